"""Cheap checks of single claims of the papers. docs/papers/claims.md has the claims and what came out."""
