"""verl's FSDP checkpoint manager: an asynchronous save publishes verl's tracker when it is durable, and a killed run resumes from it."""

import shutil
import time

from conftest import files_below, full, interpreter


def job(node, run, *more, **options):
    node.environment.update(VERL_ENGINE_VENDOR="nebula", VERL_ENGINE_DEVICE="cpu")
    return node.run(interpreter("verl"), "verl_job.py", "--run", node.base / run, *more, ranks=2, **options)


@full
def test_the_tracker_names_what_is_durable_and_the_run_resumes_from_it_after_sigkill(node):
    whole = job(node, "stock", "--stock", "--steps", 8)
    assert not (node.base / "stock" / "latest_checkpointed_iteration.txt").exists()  # so a run of verl's own begins at 0
    node.environment["NEBULA_STORE_MBPS"] = "0.02"  # step 4 is not durable yet when all ranks are killed
    job(node, "run", "--kill-at", 4, check=False)
    assert (node.base / "run" / "latest_checkpointed_iteration.txt").read_text() == "2"
    del node.environment["NEBULA_STORE_MBPS"]
    again = job(node, "run", "--steps", 8)
    assert again.resumed == 2 and again.losses == whole.losses_after(2)
    assert (node.base / "run" / "latest_checkpointed_iteration.txt").read_text() == "8"
    of_run, of_stock = (files_below(node.base / run / "global_step_8" / "actor") for run in ("run", "stock"))
    assert of_run == of_stock
    end = time.monotonic() + 30
    while (node.base / "run" / "global_step_4" / "actor").exists():  # max_ckpt_to_keep is 2, and counts saves of this process
        assert time.monotonic() < end, again.end
        time.sleep(0.05)
    assert (node.base / "run" / "global_step_6" / "actor").exists()


# fault (Storage): A run goes on from an older step and saves a step again, whose earlier directory is there, and is killed at once.
# result: The tracker names the step when the new directory has taken the old one's place, and a load waits for that.
@full
def test_a_directory_that_is_saved_again_is_the_new_one_for_the_tracker_and_for_a_load(node):
    tracker = node.base / "run" / "latest_checkpointed_iteration.txt"
    job(node, "run", "--steps", 4)
    other = ["--from-step", 2, "--seed", 7]
    tracker.write_text("2")
    shutil.copytree(node.base / "run", node.base / "stock")
    whole = job(node, "stock", "--stock", *other, "--steps", 5)
    node.forget_memory()  # the next agent knows this variable
    node.environment["NEBULA_STORE_MBPS"] = "0.004"  # step 4 is not durable yet when all ranks are killed
    assert job(node, "run", *other, "--kill-at", 4, check=False).losses == {step: whole.losses[step] for step in (3, 4)}
    assert tracker.read_text() == "2", "the tracker names a directory that is still the old one"
    again = job(node, "run", *other, "--from-step", 4, "--steps", 5)
    assert again.losses == whole.losses_after(4)


def test_a_rollout_has_the_weights_of_each_step_by_verls_interface_and_never_those_of_the_run_that_was_killed(node, tmp_path):
    def transfers(steps, seed, *more, **options):
        said = node.run(
            interpreter("verl"), "verl_weights_job.py", "--path", node.base / "weights", "--out", tmp_path, "--steps", steps, "--seed", seed, *more,
            ranks=3, **options,
        )  # fmt: skip
        return said.lines

    assert transfers("1,2,3", 1, "--kill", check=False) == [{"step": step, "same": True} for step in (1, 2, 3)]
    assert transfers("3,4", 2) == [{"step": step, "same": True} for step in (3, 4)]
