"""Settings of a defaults file for training jobs that SDK 3 reads and drops.

SDK 3.27 looks up the VPC and the tags without its session, which finds nothing. It looks up the KMS keys after its
constructor has filled in the records that would take them, and it never looks up the encryption of traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smp_estimator.sdk_v3.sdk import Networking, Tag, instance_supports_kms
from smp_estimator.sdk_v3.settings import given_value

if TYPE_CHECKING:
    from smp_estimator.sdk_v3.settings import JobLocation


def fill_in_dropped(trainer: Any, where: JobLocation) -> None:
    """Set what the defaults file has for training jobs and neither an argument nor the SDK has set."""
    section = _section(trainer.sagemaker_session)
    vpc = section.get("VpcConfig") or {}
    networking = {
        "subnets": vpc.get("Subnets"),
        "security_group_ids": vpc.get("SecurityGroupIds"),
        "enable_inter_container_traffic_encryption": section.get("EnableInterContainerTrafficEncryption"),
    }
    trainer.networking = _completed(trainer.networking, networking)
    tags = section.get("Tags")
    if not trainer.tags and tags:
        trainer.tags = [Tag(key=tag["Key"], value=tag["Value"]) for tag in tags]
    if trainer.output_data_config is not None:
        output = section.get("OutputDataConfig") or {}
        trainer.output_data_config = _completed(trainer.output_data_config, {"kms_key_id": output.get("KmsKeyId")})
    kinds = [each.instance_type for each in where.all]
    takes_key = all(isinstance(kind, str) and instance_supports_kms(kind) for kind in kinds)
    if takes_key:
        resources = section.get("ResourceConfig") or {}
        trainer.compute = _completed(trainer.compute, {"volume_kms_key_id": resources.get("VolumeKmsKeyId")})


def _section(session: Any) -> Mapping[str, Any]:
    """Return the section of the session's defaults for training jobs."""
    config = getattr(session, "sagemaker_config", None) or {}
    defaults = config.get("SageMaker") or {}
    return defaults.get("TrainingJob") or {}


def _completed(record: Any, defaults: Mapping[str, Any]) -> Any:
    """Return one of the SDK's records with the missing fields filled in, or the record itself if none is filled in."""
    missing = {}
    for name, value in defaults.items():
        if value is not None and given_value(record, name) is None:
            missing[name] = value
    if not missing:
        return record
    if record is None:
        return Networking(**missing)
    # A copy: the record is the user's, who may give it to other trainers.
    return record.model_copy(update=missing)
