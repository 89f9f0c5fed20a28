"""The image of an estimator's job: the one that is named, or the stock image that fits it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_config.machine.instances import instance
from smp_estimator.cloud import image_choice, image_table, images, restore, service
from smp_estimator.local.process_mode import PROCESS_IMAGE
from smp_estimator.sdk.version_2 import Framework, region_of
from smp_estimator.settings.distribution import is_version_2

if TYPE_CHECKING:
    from smp_estimator.cloud.image_choice import ImageChoice
    from smp_estimator.cloud.image_table import TrainingImage
    from smp_estimator.settings.distribution import SettingsReader

    _SDK = Framework
else:
    _SDK = object


class InStockImage(_SDK):
    """Mixin before an estimator class of the SDK that chooses the image for jobs with this package's libraries.

    A class that uses it defines how the image is chosen (:meth:`_choose_image`), and its row in the table of images
    (:meth:`_table_row`).
    """

    #: Names of the arguments by which the stock image is chosen, PyTorch's or Transformers' version first.
    _VERSIONS: tuple[str, ...] = ()

    distribution: Any
    framework_version: Any
    instance_groups: Any
    _reader: SettingsReader
    _process_mode: bool
    _recipe: bool
    #: Whether the runtime travels with the code, if the distribution is one that needs it.
    _ship_runtime: bool
    #: What was chosen where neither ``image_uri`` nor the SDK names the image.
    _stock_image: ImageChoice | None = None
    #: Whether an argument chose among the stock images.
    _named_stock_image = False

    def _choose_image(self, sdk: dict[str, Any], floor: tuple[int, int], **wanted: Any) -> ImageChoice | None:
        """Fill in the versions of the stock image that a job without ``image_uri`` runs in; PyTorch is ``floor`` or newer.

        Args:
            sdk: arguments for the SDK's class.
            wanted: further arguments of ``image_choice.choose_pytorch``.

        Returns:
            None where the SDK's class forms the address of every image that can be chosen.
        """
        raise NotImplementedError

    def _table_row(self) -> TrainingImage | None:
        """Return the row of the table of images for the stock image that the versions name."""
        raise NotImplementedError

    def _carried_instance_type(self) -> str | None:
        raise NotImplementedError

    # -- at construction -----------------------------------------------------------------------------------

    def _require_versions(self, sdk: dict[str, Any]) -> None:
        """Raise ConfigError if a job under the SDK's own rules names neither an image nor all of its versions."""
        wanted = dict.fromkeys(self._VERSIONS)
        missing = [name for name in wanted if sdk.get(name) is None]
        is_of_tensorflow = sdk.get("tensorflow_version") is not None
        if not missing or is_of_tensorflow or self._recipe or restore.is_attaching():
            return
        self._choose_image(wanted, images.TORCH_FLOOR, by_name=True)  # what the SDK's own class takes
        verb = "is" if len(missing) == 1 else "are"
        example = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
        raise ConfigError(
            f"{' and '.join(missing)} {verb} missing, and so is image_uri; they are filled in only "
            "for jobs whose distribution enables smdistributed.modelparallel: give for example "
            f"{example}, or image_uri",
            code="SMP123",
        )

    def _prepare_cloud(self, image_uri: Any, ship_runtime: bool | None, distribution: Any, sdk: dict[str, Any]) -> None:
        """Settle the image, how the runtime gets there, and the defaults."""
        if not image_uri and is_version_2(distribution):
            self._replace_image_of_original(sdk)
        self._settle_image(image_uri, ship_runtime, sdk, images.TORCH_FLOOR)
        service.fill_in_cloud(sdk)

    def _prepare_data_parallel(self, image_uri: Any, ship_runtime: bool | None, sdk: dict[str, Any]) -> None:
        """Choose the image for the data parallel library, unless it is an old stock image with its own copy of the library."""
        if not images.has_own_data_parallel(image_uri, sdk.get("pytorch_version") or sdk.get("framework_version")):
            self._settle_image(image_uri, ship_runtime, sdk, images.DATA_PARALLEL_FLOOR)

    def _replace_image_of_original(self, sdk: dict[str, Any]) -> None:
        """Replace a ``framework_version`` that has an image of the original library only by the nearest stock image's.

        Notebooks of version 2 name these versions. The runtime travels with the code, into an image of PyTorch.
        """
        given = sdk.get("framework_version")
        stock = image_choice.stock_version_for_original(given, images.TORCH_FLOOR)
        if stock is None:
            return
        self._reader.say(
            f"framework_version is {given}, whose image has the original of the library and no longer changes; the job "
            f"runs in the stock image of PyTorch {stock}, the nearest that the runtime can use"
        )
        sdk["framework_version"], sdk["py_version"] = stock, None

    def _settle_image(
        self, image_uri: Any, ship_runtime: bool | None, sdk: dict[str, Any], floor: tuple[int, int]
    ) -> None:
        if image_uri:
            lack = images.lacks_toolkit(image_uri)
            if lack is not None:
                self._reader.say(lack)
        else:
            self._named_stock_image = any(sdk.get(name) is not None for name in self._VERSIONS)
            wanted = {"gpus": _gpus(sdk), "region": region_of(sdk.get("sagemaker_session"))}
            with restore.lenient_when_attaching(self._reader.say):
                self._stock_image = self._choose_image(sdk, floor, **wanted)
        lacks_runtime = not image_uri or images.is_stock(image_uri)
        self._ship_runtime = lacks_runtime if ship_runtime is None else ship_runtime
        if self._ship_runtime:
            with restore.lenient_when_attaching(self._reader.say):
                images.check_stock_version(image_uri, floor)

    # -- of a job ------------------------------------------------------------------------------------------

    def _image_row(self) -> TrainingImage | None:
        """Return the row of the job's image in the table of images, or None if the image is not in the table."""
        return image_table.row_of(self.image_uri) if self.image_uri else self._table_row()

    def _warn_of_image(self) -> None:
        """Log a warning if the job's image does not support its instances, or is no longer patched."""
        row = self._image_row()
        known = instance(self._carried_instance_type() or "")
        gpu = None
        if known is not None:
            gpu = known.gpu
        findings = [self._lack_of_image(row, gpu)]
        # An attached job has its image already.
        if row is not None and not restore.is_attaching():
            findings.append(images.patches_ended(row, images.today(), self._image_argument(), gpu))
        for finding in findings:
            if finding is not None:
                self._reader.say(finding)

    def _lack_of_image(self, row: TrainingImage | None, gpu: str | None) -> str | None:
        if gpu is None:
            return None
        image = self.image_uri or (None if row is None else row.name)
        return images.lacks_code_for(image, gpu)

    def _image_argument(self) -> str | None:
        """Return the name of the argument that has chosen the image, or None if it was filled in."""
        if self.image_uri:
            return "image_uri"
        return self._VERSIONS[0] if self._named_stock_image else None

    def training_image_uri(self, region: str | None = None) -> Any:
        """Return the image of the job; in process mode, a placeholder name.

        Args:
            region: of the registry; default: the session's.

        Returns:
            The address of the image.

        Example:
            >>> estimator.training_image_uri()
            '...'
        """
        if self._process_mode:
            return PROCESS_IMAGE
        chosen = self._stock_image
        if self.image_uri or chosen is None:
            return self._image_uri_of_sdk(region)
        # A script may have set another version since.
        has_changed = self.framework_version != chosen.framework_version
        if chosen.image.by_name or has_changed:
            return self._image_uri_of_sdk(region)
        where = region or self.sagemaker_session.boto_region_name
        return chosen.address(where, self._get_instance_type())

    def _image_uri_of_sdk(self, region: str | None) -> Any:
        with self._not_as_original():
            return super().training_image_uri(region)

    @contextmanager
    def _not_as_original(self) -> Iterator[None]:
        """Hide ``torch_distributed`` from the SDK, which takes it beside ``smdistributed`` for the original's image."""
        distribution = self.distribution
        if is_version_2(distribution):
            self.distribution = {name: part for name, part in distribution.items() if name != "torch_distributed"}
        try:
            yield
        finally:
            self.distribution = distribution


def _gpus(sdk: dict[str, Any]) -> frozenset[str]:
    """Return the known GPU models of the instances that an estimator's arguments name."""
    kinds = [sdk.get("instance_type")]
    groups = sdk.get("instance_groups") or ()
    kinds += [group.instance_type for group in groups]
    gpus = set()
    for kind in kinds:
        known = instance(kind) if isinstance(kind, str) else None
        if known is not None:
            gpus.add(known.gpu)
    return frozenset(gpus)
