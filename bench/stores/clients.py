"""Makes one transfer by one of the Python clients, in their environment: ``clients.py CLIENT up|down BYTES``.

Environment variables name the store (sinks.py). Prints one JSON object: seconds, and the processor seconds of this process. Before the
clock starts, the memory is touched and the client has sent a small object. Every client sends pieces of 8 MiB, eight at a time.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable

PIECE = 8 << 20
WIDTH = 8
BUCKET = "bench"
Transfers = tuple[Callable[[str, memoryview], None], Callable[[str, memoryview], None]]


class Into(io.RawIOBase):
    """A file object that writes into existing memory."""

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.at = memory, 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset if whence == 0 else self.at + offset if whence == 1 else len(self.memory) + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def write(self, data: bytes) -> int:
        self.memory[self.at : self.at + len(data)] = data
        self.at += len(data)
        return len(data)


def boto3(_: str) -> Transfers:
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    config = TransferConfig(multipart_threshold=PIECE, multipart_chunksize=PIECE, max_concurrency=WIDTH)

    def up(key: str, data: memoryview) -> None:
        client.upload_fileobj(io.BytesIO(data), BUCKET, key, Config=config)

    def down(key: str, memory: memoryview) -> None:
        client.download_fileobj(BUCKET, key, Into(memory), Config=config)

    return up, down


def crt(_: str) -> Transfers:
    """Returns the client that boto3 uses with preferred_transfer_client="crt". boto3 itself uses it only for https."""
    import botocore.session
    from s3transfer import crt

    session = botocore.session.get_session()
    serializer = crt.BotocoreCRTRequestSerializer(
        session, client_kwargs={"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
    )
    credentials = crt.BotocoreCRTCredentialsWrapper(session.get_credentials()).to_crt_credentials_provider()
    client = crt.create_s3_crt_client("us-east-1", credentials, part_size=PIECE, use_ssl=False)
    manager = crt.CRTTransferManager(client, serializer)

    def up(key: str, data: memoryview) -> None:
        manager.upload(io.BytesIO(data), BUCKET, key).result()

    def down(key: str, memory: memoryview) -> None:
        manager.download(BUCKET, key, Into(memory)).result()

    return up, down


def azure(_: str) -> Transfers:
    from azure.storage.blob import BlobServiceClient

    service = BlobServiceClient.from_connection_string(
        os.environ["AZURE_STORAGE_CONNECTION_STRING"],
        max_block_size=PIECE,
        max_single_put_size=PIECE,
        max_single_get_size=PIECE,
        max_chunk_get_size=PIECE,
    )

    def up(key: str, data: memoryview) -> None:
        service.get_blob_client(BUCKET, key).upload_blob(data.obj, max_concurrency=WIDTH, overwrite=True)

    def down(key: str, memory: memoryview) -> None:
        service.get_blob_client(BUCKET, key).download_blob(max_concurrency=WIDTH).readinto(Into(memory))

    return up, down


def s3torchconnector(_: str) -> Transfers:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    client = S3Client(
        "us-east-1",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(part_size=PIECE, force_path_style=True),
    )

    def up(key: str, data: memoryview) -> None:
        with client.put_object(BUCKET, key) as writer:
            for offset in range(0, len(data), PIECE):
                writer.write(data[offset : offset + PIECE])

    def down(key: str, memory: memoryview) -> None:
        with client.get_object(BUCKET, key) as reader:
            reader.readinto(memory)

    return up, down


def s3dlio(_: str) -> Transfers:
    import asyncio

    import s3dlio

    def up(key: str, data: memoryview) -> None:
        writer = s3dlio.MultipartUploadWriter(BUCKET, key, part_size=PIECE, max_in_flight=WIDTH)
        for offset in range(0, len(data), PIECE):
            writer.write(data[offset : offset + PIECE])
        writer.close()

    def down(key: str, memory: memoryview) -> None:
        async def get() -> None:
            await s3dlio.get_into_async(f"s3://{BUCKET}/{key}", memory, expected_len=len(memory))

        asyncio.run(get())

    return up, down


CLIENTS: dict[str, Callable[[str], Transfers]] = {
    "boto3": boto3,
    "crt": crt,
    "azure": azure,
    "s3torchconnector": s3torchconnector,
    "s3dlio": s3dlio,
}


def main() -> None:
    name, direction, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    up, down = CLIENTS[name](name)
    up("small", memoryview(b"small"))
    data = bytes(os.urandom(1 << 20)) * (size >> 20)
    memory = memoryview(data if direction == "up" else bytearray(data))
    begun, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    if direction == "up":
        up(f"object-{os.getpid()}", memory)
    else:
        down(f"pattern-{size}", memory)
    wall, ended = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    used = ended.ru_utime + ended.ru_stime - cpu.ru_utime - cpu.ru_stime
    if direction == "down" and memory[size - 64 :] == data[size - 64 :]:
        raise RuntimeError("nothing arrived")
    print(json.dumps({"wall_s": wall, "cpu_s": used}))


main()
