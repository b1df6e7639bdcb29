"""Per-example gradients kept factored: what clipping needs of them are norms and weighted sums.

A `Factor` stands for the gradients of B examples with respect to one parameter. The gradient of a linear map's weight,
for one, is an outer product: its norm follows from two vectors, and the sum over examples is one matrix product.

The privacy guarantee rests on this room. A norm that is too small lets an example add more than the bound. Each factor
is compared with gradients written out, in `tests/contract`.
"""
