"""Per-example gradients in factored form: their norms and their weighted sums.

Clipping needs two things of a batch's gradients: the norm of each, and one weighted sum. A `Factor` computes both for
one parameter, usually without storing a gradient per example. For instance, the gradient of a linear layer's weight
is an outer product: its norm follows from two vectors, and the sum over examples is one matrix product.

`base` defines the interface, and `norms` the norms. A `LinearMapFactor` can also be used as a layer's weight, which BAM
and local training need. `displacement` describes the parameters that they move. Most other files hold the factors of
one kind of parameter. The rules in `privgrad.gradient.layers` build factors, and `privgrad.gradient.clipping` uses
them.

The privacy guarantee rests on this package: a norm that is too small lets an example add more than the bound.
`tests/contract` compares each factor with gradients that are written out in full.
"""
