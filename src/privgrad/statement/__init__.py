"""The statement of a guarantee, models that are saved with theirs, and the model card."""

from privgrad.statement.text import About, Statement, budget_statement, statement

__all__ = ["About", "Statement", "budget_statement", "statement"]
