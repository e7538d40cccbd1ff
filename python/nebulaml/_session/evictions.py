"""Evictions: a thread asks the cloud's metadata service whether this machine will be taken away. One rank per node runs it."""

from __future__ import annotations

import datetime
import email.utils
import json
import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from ..errors import NebulaConfigError

__all__ = ["CLOUDS", "Watch"]

log = logging.getLogger("nebulaml")

PAUSE_S = 1.0  # between two questions: Azure gives 30 s of notice, and asks its users for one question a second
ANSWER_S = 2.0  # the service is on this machine; only Azure's first answer may take minutes, and the thread asks again
NOTICE_S = {"azure": 30.0, "aws": 120.0, "gce": 30.0}  # if the service names no time
WARN_AFTER = 30  # failures in a row

_ENDS = ("Reboot", "Redeploy", "Preempt", "Terminate")  # of Azure's event types; "Freeze" only pauses the machine


class Watch(threading.Thread):
    """Calls ``tell(reason, seconds)`` once, when this machine is about to go, and ends.

    cloud: "azure", "aws" or "gce". NEBULA_METADATA_URL names another service than the cloud's own, for tests.
    """

    def __init__(self, cloud: str, tell: Callable[[str, float], object]) -> None:
        if cloud not in CLOUDS:
            raise NebulaConfigError(f"evictions={cloud!r}: give one of {', '.join(map(repr, CLOUDS))}")
        super().__init__(name="nebula-evictions", daemon=True)
        self._cloud, self._tell = cloud, tell
        self._ended = threading.Event()
        self._kept: dict[str, str] = {}  # answers of the service that do not change

    def run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            try:
                found = CLOUDS[self._cloud](self._kept)
                failures = 0
            except (OSError, ValueError, KeyError, TypeError) as failure:
                found = None
                self._kept.clear()
                failures += 1
                if failures == WARN_AFTER:
                    log.warning("nebula: the metadata service of %s does not answer, so Nebula notices no eviction: %s", self._cloud, failure)
            if found is not None:
                self._tell(*found)
                return
            self._ended.wait(PAUSE_S)

    def end(self) -> None:
        """Ends the questions."""
        self._ended.set()


def _ask(path: str, headers: Mapping[str, str], usual: str = "http://169.254.169.254", method: str = "GET") -> str | None:
    """Returns the text of an answer. None: there is no such object (404)."""
    url = (os.environ.get("NEBULA_METADATA_URL") or usual).rstrip("/") + path
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would answer for another machine
    try:
        with direct.open(request, timeout=ANSWER_S) as answer:
            return str(answer.read(1 << 20).decode())
    except urllib.error.HTTPError as failure:
        if failure.code == 404:
            return None
        raise


def _seconds_until(when: datetime.datetime, least: float) -> float:
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.timezone.utc)
    return max(least, (when - datetime.datetime.now(datetime.timezone.utc)).total_seconds())


def _azure(kept: dict[str, str]) -> tuple[str, float] | None:
    """Asks Azure for scheduled events, which are those of the whole scale set.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """
    headers = {"Metadata": "true"}
    if "name" not in kept:
        kept["name"] = _ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers) or ""
    text = _ask("/metadata/scheduledevents?api-version=2020-07-01", headers)
    for event in json.loads(text or '{"Events": []}')["Events"]:
        if event["EventType"] in _ENDS and kept["name"] in event["Resources"]:
            before = event.get("NotBefore")
            seconds = _seconds_until(email.utils.parsedate_to_datetime(before), 0.0) if before else NOTICE_S["azure"]
            return f"Azure's scheduled event {event['EventType']}", seconds
    return None


def _aws(kept: dict[str, str]) -> tuple[str, float] | None:
    """Asks AWS for a spot interruption notice, with a token of IMDSv2.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    if "token" not in kept:
        kept["token"] = _ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, method="PUT") or ""
    text = _ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": kept["token"]})
    if text is None:
        return None
    notice = json.loads(text)
    when = datetime.datetime.fromisoformat(notice["time"].replace("Z", "+00:00"))
    return f"AWS's spot notice {notice['action']}", _seconds_until(when, 0.0)


def _gce(kept: dict[str, str]) -> tuple[str, float] | None:
    """Asks GCE for a preemption. https://cloud.google.com/compute/docs/instances/create-use-preemptible"""
    text = _ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}, "http://metadata.google.internal")
    return ("GCE's preemption", NOTICE_S["gce"]) if text is not None and text.strip() == "TRUE" else None


CLOUDS: dict[str, Callable[[dict[str, str]], tuple[str, float] | None]] = {"azure": _azure, "aws": _aws, "gce": _gce}
