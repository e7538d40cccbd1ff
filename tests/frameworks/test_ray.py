"""Ray Train: a worker is killed, Ray starts both again, and they resume from memory. Ray registers the durable checkpoints."""

import json

import torch
from conftest import full, interpreter


def losses_of_one_process(steps):
    """Computes the losses of DDP with two ranks in one process: the sum of half of each rank's gradient."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), {}
    for step in range(1, steps + 1):
        gradients = []
        for rank in (0, 1):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            gradients.append(torch.autograd.grad(loss, model.parameters()))
            losses.setdefault(step, loss.item())
        for parameter, first, second in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = first / 2 + second / 2
        optimizer.step()
    return losses


@full
def test_two_workers_resume_bit_for_bit_from_memory_when_one_is_killed(node):
    node.environment["NEBULA_STORE_MBPS"] = "0.02"  # Ray knows of an older checkpoint, if of any, when the worker dies
    node.environment["HOME"] = str(node.base)  # Ray keeps a token there
    log = node.base / "losses.jsonl"
    result = node.run(interpreter("ray"), "ray_job.py", "--storage", node.base / "storage", "--log", log, "--kill-at", 4, timeout=560)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    resumed = next(line for line in lines if "resumed" in line)
    assert resumed["resumed"] == "step-4" and resumed["known"] != "step-4"
    at, expected = lines.index(resumed), losses_of_one_process(6)
    assert [line for line in lines[:at] if line["step"] <= 4] == [{"step": step, "loss": expected[step]} for step in range(1, 5)]
    assert lines[at + 1 :] == [{"step": step, "loss": expected[step]} for step in (5, 6)]
    assert result.end["last"] == "step-6" and {"rank-0.pt", "rank-1.pt"} <= set(result.end["files"])
