"""The fast engine: the gradient of each example's own loss, from one forward and one backward pass for all examples.

Nothing here is trusted alone: a few examples of the 1st, 2nd, 4th, 8th ... batch are compared with their gradients
alone. This is a check, not a proof; the reference, which computes each example as a batch of one, is
`privgrad.gradient.reference`.

The engine finds once all that depends on the modules alone: the units with their rules, the names, the number of
values. It does so again when `gradient.functional.Structure` sees a change. A pass finds what depends on the examples.

The life of a pass:
1. Learn (`factored`, `layouts`), on the first batch and when the calls change: run few examples twice, with two batch
   sizes. The dimension that grows holds the examples.
2. Forward (`capture`): the units get a new forward, which computes from detached parameters and leaves a tap at its
   output. Functions of parameters are computed by a rule, or from a copy of the parameter for each example.
3. Backward (`passes`): torch computes the gradients at the taps, never the gradient of a weight. From each and from the
   unit's inputs, a rule makes a factor. Factors of one parameter are added.
4. Displaced passes, for BAM and local training: the same, at each example's own parameters (`factors.displacement`).
5. Check (`self_check`) where due. A refused unit is computed by vmap instead, or a module above it, or the whole loss.
Then `privgrad.clip.clipping` asks the factors for the norms and one weighted sum.

`units` has one call by a rule or by vmap, `shared_values` what is computed once for all examples, `layers` a rule for
each type of layer, and `factors` the gradients of each kind of parameter.

Words:
- additive: of a backward pass: that of a sum is the sum of those of the examples.
- apart: of examples: none influences the gradient of another. Of products: computed for each example by itself.
- attributed: of a result: known to hold the examples in one dimension, or none of them.
- audit: to learn the layouts from a few examples, and have the next batch checked.
- copy: a parameter or shared value repeated for each example; the gradients at the copies are those of the examples.
- curved: of a pass: it computes Hessian products.
- displacement: how far an example's own parameters are from the weights; parameters that have one move.
- gap: the time between two calls of units. Functions are seen in gaps where one with a shared value was met.
- layout: for each tensor of a call, the dimension that holds the examples and the rows per example.
- position: a time step, pixel or word of one example; a factor adds up one term for each.
- pull: to multiply gradients of a weight with the transposed Jacobian, which gives those of its parameters.
- shared value: what the model computes once for all examples, from parameters alone.
- tap: a place in the graph where the gradient of each example is computed.
- term bound: a bound on the norms of the terms that make up a gradient; they may cancel, their rounding errors do not.
- unit: a module whose forward is replaced.
- views: groups of rows of one example that are apart in a tensor, as in `model(torch.cat([a, b]))`.
- whole: of a module: computed by vmap, each example by itself.
"""
