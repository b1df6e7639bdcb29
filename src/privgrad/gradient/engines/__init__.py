"""The two engines, which compute the gradient of each example's own loss for PrivateGradient.

`vmap.Vmap` is the reference: it computes each example by itself, as a batch of one, and stores its whole gradient.
`factored.Factored` is the fast engine: it runs one forward and one backward pass for all examples. The rules of
`privgrad.gradient.layers` then describe each gradient by factors, such as a layer's inputs and output gradients.
All other files are parts of Factored. `passes` runs the forward and backward passes, and `memory` sizes them. `capture`
replaces the forwards of the layers and records `taps`. A call by a rule is a `layer_call`, and one by vmap is a
`vmapped_unit`. `layouts` finds the dimension of the examples, and `layout_cache` keeps it. `arguments` finds changed
arguments, `hvp` computes Hessian products, `self_check` compares, and `refusals` are the errors.

The privacy guarantee rests on one property of an engine: row i of its result depends on example i, the model and
public numbers only. `privgrad.gradient.clipping` then bounds each row. Vmap has the property if torch's batching rules
are correct (see `privgrad.gradient.batching`), and if the model and loss keep no state outside of the modules. Factored
compares a few examples of the 1st, 2nd, 4th, 8th ... batch with autograd (`self_check`), and raises an error if they
differ. This is a check, not a proof.
"""
