"""S3 for jobs on this machine, used only if a job names an ``s3://`` address: a client searches for credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from smp_config import ConfigError
from smp_estimator.local.files.uris import bucket_and_key
from smp_estimator.sdk.functions import download_folder

#: A region has to be named even if there is no account.
FALLBACK_REGION = "us-east-1"


class S3Access:
    """S3 access of a session that runs jobs on this machine.

    Attributes:
        boto_session: makes the client and the resource, when one is first used.
        chosen_region: of the user's AWS configuration; None when there is none.
        s3_endpoint_url: another S3 than Amazon's; None for that one.
    """

    boto_session: Any
    chosen_region: str | None
    s3_endpoint_url: str | None
    #: Client and resource, by these words, as they are made.
    _s3: dict[str, Any]

    @property
    def s3_resource(self) -> Any:
        """Return boto3's resource, as the SDK's functions expect it."""
        return self._s3_part("resource")

    @s3_resource.setter
    def s3_resource(self, value: Any) -> None:
        self._set_s3_part("resource", value)

    @property
    def s3_client(self) -> Any:
        """Return boto3's client, as the SDK's functions expect it."""
        return self._s3_part("client")

    @s3_client.setter
    def s3_client(self, value: Any) -> None:
        self._set_s3_part("client", value)

    def _s3_part(self, kind: str) -> Any:
        if kind not in self._s3:
            make = getattr(self.boto_session, kind)
            self._s3[kind] = make(
                "s3", region_name=self.chosen_region or FALLBACK_REGION, endpoint_url=self.s3_endpoint_url
            )
        return self._s3[kind]

    def _set_s3_part(self, kind: str, value: Any) -> None:
        # The SDK's constructor assigns None; that means "not made yet".
        if value is not None:
            self._s3[kind] = value

    def download(self, uri: str, folder: Path) -> None:
        """Fetch the current contents of an ``s3://`` prefix into an empty folder, as the SDK's own data source does.

        Raises:
            ConfigError: AWS refuses, or there are no credentials.
        """
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")  # with its last slash, which excludes "prefix2/"
        try:
            download_folder(bucket, prefix, str(folder), self)
        except (BotoCoreError, ClientError) as error:
            raise ConfigError(
                f"{uri} could not be downloaded: {error}; an s3:// address needs AWS credentials that may read it: "
                "configure them, or give a local directory as 'file:///the/directory'",
                code="SMP114",
            ) from error

    def upload_file(self, path: str, uri: str) -> None:
        """Put one file at an ``s3://`` address."""
        from boto3.s3.transfer import TransferConfig

        bucket, key = bucket_and_key(uri)
        # Without threads: a job that outlives the notebook is packed while the interpreter shuts its pools down.
        self.s3_resource.Object(bucket, key).upload_file(path, Config=TransferConfig(use_threads=False))
