"""``create_model()`` and ``deploy()`` of an estimator: serving a job's model, through the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_estimator.local.process_mode import NoContainers

if TYPE_CHECKING:
    from smp_estimator.sdk.version_2 import Framework

    _SDK = Framework
else:
    _SDK = object


class ServingMixin(_SDK):
    """Hands a trained model to the SDK's serving."""

    latest_training_job: Any
    _process_mode: bool

    def create_model(self, *args: Any, **kwargs: Any) -> Any:
        """Create a model that can be deployed, as in the SDK, also for a job in a custom image of unknown version.

        Args:
            args, kwargs: as in the SDK.

        Returns:
            The SDK's model.

        Example:
            >>> model = estimator.create_model(entry_point="inference.py")  # doctest: +SKIP
        """
        model: Any = super().create_model(*args, **kwargs)  # type: ignore[safe-super]
        if hasattr(model, "_is_mms_version") and model.framework_version is None:
            # Every PyTorch that the runtime works with is served from a repacked archive; the SDK asks the version.
            model._is_mms_version = lambda: True  # noqa: SLF001 - the SDK asks nowhere else
        return model

    def deploy(self, *args: Any, **kwargs: Any) -> Any:
        """Deploy the model, as in the SDK; not available for jobs that ran as processes of this machine.

        Args:
            args, kwargs: as in the SDK.

        Returns:
            The SDK's predictor.

        Raises:
            NoContainers: the job ran as processes of this machine.

        Example:
            >>> predictor = estimator.deploy(1, "ml.g5.xlarge", entry_point="inference.py")  # doctest: +SKIP
        """
        if self._process_mode:
            raise NoContainers(
                "deploy() starts a serving container, and this estimator's session runs processes without Docker; the "
                f"model is {self.model_data if self.latest_training_job else 'made by fit()'}: load it in Python, or make "
                "a sagemaker.pytorch.PyTorchModel of it with a Docker or cloud session"
            )
        return super().deploy(*args, **kwargs)
