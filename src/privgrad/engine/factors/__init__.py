"""Per-example gradients in factored form: their norms and their weighted sums.

Clipping needs two things of a batch's gradients: the norm of each, and one weighted sum. A `Factor` computes both for
one parameter, usually without storing a gradient per example. For instance, the gradient of a linear layer's weight
is an outer product: its norm follows from two vectors, and the sum over examples is one matrix product.
"""
