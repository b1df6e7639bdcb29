"""The statement of a guarantee, models that are saved with theirs, and the model card."""

from privgrad.statement.text import Statement, budget_statement, statement

__all__ = ["Statement", "budget_statement", "statement"]
