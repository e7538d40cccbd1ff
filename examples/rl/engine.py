"""Keeps an inference server on the newest published weights, by the server's own HTTP interface.

    python examples/rl/engine.py /scratch/run7/weights http://localhost:30000 --engine sglang
    VLLM_SERVER_DEV_MODE=1 vllm serve /models/base &
    python examples/rl/engine.py /scratch/run7/weights http://localhost:8000 --engine vllm

Server and this program run on one machine, or share the directory of --directory. A server that is away or refuses is tried again, with what is
the newest then. The server's requests are not stopped before the weights are read and verified.
"""

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request

import nebulaml as nm

RETRY_S = 2.0


class Refused(Exception):
    pass


def post(url: str, body: dict | None = None) -> dict:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        raise Refused(f"{url} answers {error.code}: {error.read()[:500].decode(errors='replace')}") from None
    except (OSError, http.client.HTTPException) as error:
        raise Refused(f"{url} cannot be reached: {error}") from None
    try:
        return json.loads(text) if text else {}
    except ValueError:
        raise Refused(f"{url} does not answer with JSON: {text[:500].decode(errors='replace')}") from None


def sglang(server: str, path: str, version: nm.Published) -> None:
    answer = post(f"{server}/update_weights_from_disk", {"model_path": path, "weight_version": str(version.number)})
    if not answer.get("success"):
        raise Refused(f"SGLang refuses the weights: {answer.get('message')}")


def vllm(server: str, path: str, version: nm.Published) -> None:
    post(f"{server}/pause?mode=wait")
    try:
        post(f"{server}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
    finally:
        post(f"{server}/resume")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the publisher's path")
    parser.add_argument("server", help="the server's address, http://HOST:PORT")
    parser.add_argument("--engine", choices=["sglang", "vllm"], required=True)
    parser.add_argument("--directory", help="where the weights lie; without it, a new one in memory")
    parser.add_argument("--timeout", type=float, help="end if no newer weights have come for so many seconds")
    options = parser.parse_args()
    update = {"sglang": sglang, "vllm": vllm}[options.engine]
    with nm.Subscriber(options.path, options.directory, versions=True) as subscriber:
        version = subscriber.prepare(options.timeout)
        while version is not None:
            version.commit()
            # a name of its own for each version: some servers read a name only once
            path = str(subscriber.current.parent / f"weight_v{version.number:06d}")
            try:
                begun = time.perf_counter()
                update(options.server.rstrip("/"), path, version)
                print(f"engine: publication {version.number} step {version.step} in {time.perf_counter() - begun:.2f} s", flush=True)
                version = subscriber.prepare(options.timeout)
            except Refused as failure:
                print(f"engine: publication {version.number} step {version.step} is not served yet: {failure}", file=sys.stderr, flush=True)
                time.sleep(RETRY_S)
                version = subscriber.prepare(0) or version


if __name__ == "__main__":
    main()
