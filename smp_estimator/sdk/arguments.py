"""Arguments that the estimators pass to the SDK's classes, for editors and type checkers.

The accepted arguments follow from the installed SDK (``arguments_of`` in ``sdk/version_2.py``); a test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from smp_estimator.sdk.version_2 import InstanceGroup, PipelineVariable


class SDKArguments(TypedDict, total=False):
    """Arguments of ``sagemaker.estimator.Framework`` and its base, with the SDK's meaning."""

    base_job_name: str | None
    checkpoint_local_path: str | PipelineVariable | None
    checkpoint_s3_uri: str | PipelineVariable | None
    code_location: str | None
    container_arguments: list[str] | None
    container_entry_point: list[str] | None
    container_log_level: int | PipelineVariable
    debugger_hook_config: Any
    dependencies: list[str] | None
    disable_output_compression: bool
    disable_profiler: bool | None
    enable_infra_check: bool | PipelineVariable | None
    enable_network_isolation: bool | PipelineVariable | None
    enable_remote_debug: bool | PipelineVariable | None
    enable_sagemaker_metrics: bool | PipelineVariable | None
    enable_session_tag_chaining: bool | PipelineVariable | None
    encrypt_inter_container_traffic: bool | PipelineVariable | None
    environment: dict[str, Any] | None
    git_config: dict[str, str] | None
    input_mode: str | PipelineVariable
    instance_count: int | PipelineVariable | None
    instance_groups: list[InstanceGroup] | None
    instance_placement_config: dict[str, Any] | None
    instance_type: str | PipelineVariable | None
    keep_alive_period_in_seconds: int | PipelineVariable | None
    max_retry_attempts: int | PipelineVariable | None
    max_run: int | PipelineVariable
    max_wait: int | PipelineVariable | None
    metric_definitions: list[dict[str, Any]] | None
    model_channel_name: str | PipelineVariable
    model_uri: str | None
    output_kms_key: str | PipelineVariable | None
    output_path: str | PipelineVariable | None
    profiler_config: Any
    role: str | None
    rules: list[Any] | None
    sagemaker_session: Any
    security_group_ids: list[Any] | None
    subnets: list[Any] | None
    tags: Any
    tensorboard_output_config: Any
    training_plan: str | PipelineVariable | None
    training_repository_access_mode: str | PipelineVariable | None
    training_repository_credentials_provider_arn: str | PipelineVariable | None
    use_spot_instances: bool | PipelineVariable
    volume_kms_key: str | PipelineVariable | None
    volume_size: int | PipelineVariable
