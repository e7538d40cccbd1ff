"""Starts the trainer and the rollout. If either is killed, it starts that one again, until the trainer has made all steps."""

import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def say(line):
    sys.stdout.write(f"{line}\n")  # one write: the lines of all processes stay whole
    sys.stdout.flush()


def start(script):
    process = subprocess.Popen([sys.executable, HERE / script, *sys.argv[1:]])
    say(f"run: {script} is process {process.pid}")
    return process


def main():
    running = {script: start(script) for script in ("train.py", "rollout.py")}
    try:
        while True:
            for script, process in running.items():
                code = process.poll()
                if code is not None and code >= 0:  # the trainer has made all steps, or an error that would come again
                    return code
                if code is not None:
                    say(f"run: {script} was killed by signal {-code}")
                    running[script] = start(script)
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
