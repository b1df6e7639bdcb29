"""Everything that sees one example's gradient."""
