"""Train with user-level privacy: a simulation in one process, with 200 invented users who share the digits.

Shows   the unit of privacy is a user. Each user trains locally, and the update of a user is clipped as a whole.
Needs   pip install '.[experiments]'. Ten seconds.
Run     python examples/federated.py
Prints  accuracy on the test digits, and the user-level epsilon.
"""

import torch
import torch.nn.functional as F

import privgrad as pg
from privgrad.data import by_user, digits

data = digits()
inputs, labels = data.train.tensors
# Invented authors of the images: a user has about seven images and writes only two of the digits.
torch.manual_seed(0)
writers = torch.randint(0, 40, labels.shape) + 40 * (labels // 2)
users = by_user((inputs, labels), writers.tolist(), cap=10)

plan = pg.PrivacyPlan.for_users(
    target_epsilon=8.0,
    delta=1 / len(users),
    num_users=len(users),
    expected_cohort_size=50,
    rounds=30,
    max_update_norm=1.0,
)


def loss_fn(model, batch):  # one loss per example; LocalUpdate averages them for each user
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
private_update = pg.PrivateGradient(
    model, loss_fn, plan, perturb=pg.federated.LocalUpdate(lr=0.5, batch_size=5, epochs=2)
)
server = pg.optim.SGD(model.named_parameters(), lr=1.0)  # federated averaging; AdamBC is another choice

for cohort in plan.batches(users):  # each user with probability 1/4, independently of the others
    server.step(grad=private_update(cohort))

test_inputs, test_labels = data.test.tensors
accuracy = (model(test_inputs).argmax(1) == test_labels).float().mean().item()
spent = private_update.ledger.epsilon(delta=plan.delta)
print(f"{len(users)} users, accuracy {accuracy:.3f} at user-level epsilon {spent:.2f}")
