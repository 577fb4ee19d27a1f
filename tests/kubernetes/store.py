"""Where runs on a cluster keep what they save: an S3 store that pods and tests reach alike."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import boto3

from tests.s3.rgw import Rgw
from tests.s3.servers import ACCESS_KEY, SECRET_KEY

BUCKET = "runs"


@dataclass(frozen=True, slots=True)
class Store:
    """An address, and the variables with which it is opened."""

    address: str  # s3://BUCKET/PREFIX, without a slash at the end
    environment: Mapping[str, str]  # endpoint and keys

    def below(self, name: str) -> str:
        """An address of its own for a test."""
        return f"{self.address}/{name}-{uuid.uuid4().hex[:8]}"


def rgw_store(running: Rgw) -> Store:
    """A new bucket on a gateway of Ceph."""
    endpoint = f"http://{running.host}:{running.port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    client.create_bucket(Bucket=BUCKET)
    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
    return Store(f"s3://{BUCKET}/runs", variables)


def given_store(environment: Mapping[str, str]) -> Store | None:
    """The store that a person names for tests on their own cluster."""
    address = environment.get("PERDURE_TEST_STORE")
    if not address:
        return None
    settings = {name: value for name, value in environment.items() if name.startswith("AWS_")}
    return Store(address.rstrip("/"), settings)
