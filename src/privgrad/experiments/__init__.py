"""spec (TOML) -> runs (JSON lines) -> tables and plots."""
