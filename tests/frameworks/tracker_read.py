"""Prints the results of the tools' own readers: {"losses": [[step, value], ...], "sizes": [...], "versions": [...]}."""

import glob
import json
import struct
import sys
from pathlib import Path

tool, place = sys.argv[1:]


def tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(place, {"scalars": 0, "tensors": 0})
    found.Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in found.Tensors("nebula/version/text_summary")]
    return {
        "losses": [[event.step, event.value] for event in found.Scalars("loss")],
        "sizes": [[event.step, event.value] for event in found.Scalars("nebula/size_bytes")],
        "versions": [json.loads(text.strip("`\n")) for text in texts],
        "resumed_from": [json.loads(event.tensor_proto.string_val[0].decode().strip("`\n")) for event in found.Tensors("nebula/resumed_from/text_summary")][-1],
    }


def mlflow():
    from mlflow import MlflowClient

    uri, run = place.split("#")
    client = MlflowClient(tracking_uri=uri)
    tags = client.get_run(run).data.tags
    return {
        "losses": [[one.step, one.value] for one in client.get_metric_history(run, "loss")],
        "sizes": [[one.step, one.value] for one in client.get_metric_history(run, "nebula/size_bytes")],
        "versions": [json.loads(value) for name, value in tags.items() if name.startswith("nebula.version.")],
        "newest": tags["nebula.newest"],
        "resumed_from": json.loads(tags["nebula.resumed_from"]),
        "files": [one.path for one in client.list_artifacts(run)],
    }


def records(path):
    """W&B's file is a log of LevelDB: blocks of 32 KiB; each piece has a checksum, a length and a type, before it the file has 7 bytes."""
    data, at, whole = Path(path).read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + 7 : at + 7 + size]
        at += 7 + size
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            yield whole


def wandb():
    from wandb.proto.wandb_internal_pb2 import Record

    rows, versions, bytes_to_upload, resumed_from = [], [], 0, None
    for path in sorted(glob.glob(f"{place}/wandb/offline-run-*/run-*.wandb"))[-1:]:
        for one in records(path):
            record = Record.FromString(one)
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rows.append(row)
            for item in record.config.update if record.HasField("config") else ():
                if item.key == "nebula_resumed_from":
                    resumed_from = json.loads(item.value_json)
            artifact = None
            if record.HasField("request") and record.request.HasField("log_artifact"):
                artifact = record.request.log_artifact.artifact
            elif record.HasField("artifact"):
                artifact = record.artifact
            if artifact is not None:
                versions.append({**json.loads(artifact.metadata), "refs": [entry.ref for entry in artifact.manifest.contents]})
                bytes_to_upload += sum(bool(entry.local_path) for entry in artifact.manifest.contents)
    return {
        "losses": [[row["_step"], row["loss"]] for row in rows if "loss" in row],
        "sizes": [[row["nebula/step"], row["nebula/size_bytes"]] for row in rows if "nebula/size_bytes" in row],
        "versions": versions,
        "uploads": bytes_to_upload,
        "resumed_from": resumed_from,
    }


print(json.dumps({"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}[tool]()))
