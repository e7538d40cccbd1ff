"""The trainer: takes batches of samples, updates the policy as GRPO does, and publishes its weights. It can be killed at any time."""

import nebulaml as nm
import torch
from policy import GROUP, Batches, Policy, parser, say

SAVE_EVERY, CLIP = 10, 0.2

arguments = parser().parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
batches = Batches(arguments.path / "batches")
manager = nm.Manager(arguments.path / "checkpoints", save_every_steps=SAVE_EVERY, keep_last=2)
publisher = nm.Publisher(policy, arguments.path / "weights")


def loss_of(batch):
    """Returns GRPO's loss: an answer is as good as its reward is better than those of the other answers to its prompt."""
    text, rewards = batch["text"], batch["rewards"].view(-1, GROUP)
    better = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    logits, _ = policy(text[:, :-1])
    logs = torch.distributions.Categorical(logits=logits).log_prob(text[:, 1:])
    ratio = (logs - batch["logs"]).exp()  # the samples may come from older weights
    return -torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better).mean()


restored = manager.restore({"policy": policy, "optimizer": optimizer})
first = restored.step if restored else 0
say(f"trainer: {'resumed after' if restored else 'begins at'} step {first} weights {policy.weights_sum()}")
publisher.publish(first)  # the rollout goes on with the weights that the trainer goes on with
for step in range(first + 1, arguments.steps + 1):
    batch = batches.take(lambda: manager.stop_requested)
    if batch is None:
        break
    optimizer.zero_grad()
    loss_of(batch).backward()
    optimizer.step()
    say(f"trainer: step {step} reward {batch['rewards'].mean():.3f} weights {policy.weights_sum()}")
    publisher.publish(step)
    manager.save(step, {"policy": policy, "optimizer": optimizer})  # every 10 steps, and after SIGTERM
    if manager.stop_requested:
        break
publisher.close()
manager.close()
