"""The rollout: makes samples with the newest weights that the trainer has published. It can be killed at any time."""

from concurrent.futures import ThreadPoolExecutor

import nebulaml as nm
import torch
from policy import GROUP, PROMPTS, Batches, Policy, parser, rewards_of, say

MOST = 2  # batches with the same weights, before it waits for newer ones
PATIENCE_S = 5.0  # then it goes on with those that it has: the trainer may wait for samples

arguments = parser().parse_args()
torch.set_num_threads(1)
policy = Policy()
batches = Batches(arguments.path / "batches")
version, made = None, 0
with nm.Subscriber(arguments.path / "weights") as subscriber, ThreadPoolExecutor(1) as pool:
    coming = pool.submit(subscriber.prepare, PATIENCE_S)  # reads and verifies beside the loop
    while True:
        if version is None or made == MOST or coming.done():
            newer, made = coming.result(), 0
            if newer is not None:
                version = newer
                version.commit()
                policy.load_state_dict(version.tensors())
                weights = policy.weights_sum()
            coming = pool.submit(subscriber.prepare, PATIENCE_S)
            if version is None:
                continue
        made += 1
        text, logs = policy.answers(torch.randint(0, 8, (PROMPTS,)).repeat_interleave(GROUP))
        rewards = rewards_of(text)
        say(f"rollout: publication {version.number} step {version.step} reward {rewards.mean():.3f} weights {weights}")
        batches.put({"text": text, "logs": logs, "rewards": rewards})
