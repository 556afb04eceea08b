"""Wires the rings: artifact -> text side (no torch) and artifact -> engine (torch, imported inside the functions).

Nothing else in the package imports both ring 2 and ring 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troth.artifact.artifact import Artifact
from troth.artifact.resolve import resolve as resolve_artifact
from troth.artifact.template_source import TOOL_TEMPLATE
from troth.config.options import NO_DISK_CACHE, EngineOptions, ModelOptions
from troth.contracts.object_cache import ObjectCache
from troth.contracts.progress import LoadProgress, no_progress
from troth.errors import CapabilityUnavailable, DeviceError, ModelLoadError, OptionError

if TYPE_CHECKING:
    from troth.cache.conversation_file import CachePlace, Carried
    from troth.cache.disk_folder import DiskFolder
    from troth.config.facts import MachineFacts
    from troth.contracts.capabilities import TemplateCapabilities
    from troth.contracts.tools import CallForm
    from troth.models.registry import Recognised
    from troth.ops.registry import ProviderStatus
    from troth.run.certificate import Certificate, Computation
    from troth.run.planned import Planned
    from troth.run.worker import EngineThread
    from troth.text.call_pattern import CallPattern
    from troth.text.chat_renderer import ChatRenderer
    from troth.text.defaults import GenerationDefaults
    from troth.text.grammar import GrammarCompiler
    from troth.text.prompt import PromptBuilder
    from troth.text.template_probe import Probe
    from troth.text.tokenizer import Tokenizer


def _beginnings() -> ObjectCache:
    from troth.text.object_cache import BoundedObjects
    from troth.text.token_beginnings import BEGINNING_BYTES

    return BoundedObjects(BEGINNING_BYTES)


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns messages into token ids and back; lives in the server's process and in the engine's."""

    artifact: Artifact
    tokenizer: Tokenizer
    template: ChatRenderer | None
    defaults: GenerationDefaults
    steady_headers: bool = True
    """Whether prompts are built without what clients change with each request."""
    compilers: dict[int, GrammarCompiler] = field(default_factory=dict, compare=False)
    """Made when asked for, by size of the vocabulary."""
    beginnings: ObjectCache = field(default_factory=_beginnings, compare=False)
    """Token ids of the beginnings of chats, kept for all that build prompts from this."""
    probes: list[Probe] = field(default_factory=list, compare=False)
    """What the template was proved to do, once it was asked."""

    @property
    def probe(self) -> Probe | None:
        """What the template was proved to do; None without one. The first call renders it some 70 times (50 ms)."""
        from troth.text.probe_formats import RegistryReader
        from troth.text.template_probe import probe_template

        if self.template is not None and not self.probes:
            self.probes.append(probe_template(self.template, RegistryReader(), self.declared_calls))
        return self.probes[0] if self.probes else None

    @property
    def declared_calls(self) -> CallForm | None:
        """How the model's tokenizer config declares the calls in its answers; None where it does not, or otherwise."""
        from troth.artifact.json_file import read_json_object
        from troth.text.tool_formats.derived import declared_form

        path = self.artifact.tokenizer_files.get("tokenizer_config.json")
        declared = read_json_object(path).get("response_template") if path is not None else None
        return declared_form(declared) if isinstance(declared, dict) else None

    @property
    def capabilities(self) -> TemplateCapabilities:
        """What ``probe`` proved; without a template nothing."""
        from troth.contracts.capabilities import TemplateCapabilities

        return self.probe.capabilities if self.probe is not None else TemplateCapabilities()

    @property
    def calls(self) -> CallPattern | None:
        """How the model writes calls, where a grammar can be made of it."""
        from troth.text.call_pattern import call_pattern

        found = self.capabilities
        return call_pattern(self.probe.replies, found.tool_format, found.call_form) if self.probe is not None else None

    def grammars(self, vocab_size: int) -> GrammarCompiler:
        """Compiles grammars for a model with so many logits; the same one for the same size."""
        from troth.text.grammar import GrammarCompiler

        return self.compilers.setdefault(vocab_size, GrammarCompiler(self.tokenizer, vocab_size))

    def prompts(self, context_tokens: int) -> PromptBuilder:
        """Builds prompts for an engine with this context."""
        from troth.text.prompt import PromptBuilder

        probe = self.probe
        template = self.template.with_form(probe.form) if self.template is not None and probe is not None else None
        return PromptBuilder(
            self.tokenizer,
            template,
            context_tokens=context_tokens,
            steady_headers=self.steady_headers,
            objects=self.beginnings,
            hears_nobody=probe is not None and probe.hears_nobody,
        )


def find(options: ModelOptions) -> Artifact:
    """The artifact an option names; the demo model when it names none. Raises ModelLoadError."""
    if options.model == "":
        raise ModelLoadError("the path is empty; leave the model out for the demo model", field="model")
    return resolve_artifact(Path(options.model) if options.model is not None else None)


def load_text(artifact: Artifact, options: ModelOptions) -> TextSide:
    """Tokenizer, chat template and generation defaults of an artifact. Raises ModelLoadError."""
    from troth.text.chat_renderer import ChatRenderer
    from troth.text.chat_template import ChatTemplate
    from troth.text.defaults import GenerationDefaults

    source = artifact.chat_template.source if artifact.chat_template else None
    tool_source = artifact.chat_template.named.get(TOOL_TEMPLATE) if artifact.chat_template else None
    if options.chat_template is not None:
        try:
            source, tool_source = Path(options.chat_template).read_text(encoding="utf-8"), None
        except OSError as error:
            raise OptionError(f"chat template {options.chat_template!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise OptionError(
                f"chat template {options.chat_template!r} is not UTF-8: byte {error.start}, {error.reason}"
            ) from error
    tokenizer = load_tokenizer(artifact, template=source)

    def compiled(text: str | None) -> ChatTemplate | None:
        return ChatTemplate(text, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token) if text else None

    template = compiled(source)
    renderer = ChatRenderer(template, tool_template=compiled(tool_source)) if template is not None else None
    defaults = GenerationDefaults.from_config(artifact.generation_config)
    return TextSide(artifact, tokenizer, renderer, defaults, options.steady_headers)


def load_tokenizer(artifact: Artifact, *, template: str | None = None) -> Tokenizer:
    """The tokenizer of an artifact; a template tells which of its tokens open a text. Raises ModelLoadError."""
    from troth.text.tokenizer import Tokenizer

    if artifact.gguf is not None:
        return Tokenizer.from_gguf(artifact.gguf.metadata, str(artifact.gguf.path), template=template)
    return Tokenizer.from_folder(artifact.root, template=template)


def machine_facts() -> MachineFacts:
    """Cores, memory and CUDA devices of this machine."""
    import torch

    from troth.config.facts import GpuFacts, read_facts

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        gpu = GpuFacts(index=index, name=properties.name, total_bytes=total, free_bytes=free, capability=capability)
        gpus.append(gpu)
    return read_facts(tuple(gpus))


def plan(artifact: Artifact, model: ModelOptions, engine: EngineOptions) -> Planned:
    """Decide device, numbers, pools and context from headers alone.

    Raises:
        ModelLoadError: the architecture or its config is not supported.
        OptionError: an option cannot be honoured.
        CapabilityUnavailable: the options ask for a draft head or a draft model that cannot be had.
    """
    from troth.config.disk_quota import plan_disk_cache
    from troth.config.folders import certificates_folder
    from troth.models.registry import recognise
    from troth.run.head_decision import decide_head
    from troth.run.planned import plan_model

    facts = machine_facts()
    recognised = recognise(artifact)
    head = decide_head(recognised, engine, lambda: computation(model, engine, facts), certificates_folder())
    draft_model = _draft_model(recognised, engine)
    planned, folder = plan_model(artifact, model, engine, facts, head, draft_model), engine.disk_cache
    if folder is None or folder == NO_DISK_CACHE:
        return planned
    disk = plan_disk_cache(Path(folder).expanduser(), engine.disk_cache_bytes)
    return replace(planned, plan=replace(planned.plan, disk_cache=disk))


def _draft_model(recognised: Recognised, engine: EngineOptions) -> Recognised | None:
    """The model that the options name to draft. Raises ModelLoadError, CapabilityUnavailable."""
    from troth.models.registry import recognise
    from troth.run.draft_model import require_drafts
    from troth.text.same_vocabulary import vocabulary_difference

    if engine.draft_model is None:
        return None
    artifact = find(ModelOptions(model=engine.draft_model))
    draft_model = recognise(artifact)
    require_drafts(
        recognised,
        draft_model,
        engine,
        lambda: vocabulary_difference(load_tokenizer(recognised.artifact), load_tokenizer(artifact)),
    )
    return draft_model


def computation(model: ModelOptions, engine: EngineOptions, facts: MachineFacts) -> Computation:
    """How a model would be computed here, as certificates of draft heads bind it. Raises OptionError."""
    from troth.config.resolve import resolve
    from troth.run.certificate import Computation, implementation

    resolved = resolve(model, engine, facts)
    names = {f"cuda:{gpu.index}": gpu.name for gpu in facts.gpus}
    return Computation(
        implementation=implementation(),
        device=names.get(resolved.device, resolved.device),
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        providers=tuple(status.name for status in provider_status(engine.providers) if status.active),
    )


def certify(
    artifact: Artifact, model: ModelOptions, engine: EngineOptions, progress: LoadProgress = no_progress
) -> tuple[Certificate, Path]:
    """Prove a model's draft head by running it; what was found, and where the certificate belongs. Writes nothing.

    Raises:
        CapabilityUnavailable: there is no draft head to prove, or no folder for certificates.
        ModelLoadError, OptionError, OutOfMemory: as ``plan`` and ``start_engine``.
    """
    from troth import __version__
    from troth.config.folders import certificates_folder
    from troth.run.certificate import Certificate, certificate_path
    from troth.run.certification import certify_head
    from troth.text.certifying import certifying_prompts

    folder = certificates_folder()
    if folder is None:
        raise CapabilityUnavailable("certification", "this machine has no folder for certificates; set XDG_CACHE_HOME")
    asked = replace(engine, speculation=("mtp",), speculate_uncertified=True)
    planned, text = plan(artifact, model, asked), load_text(artifact, model)
    bound = computation(model, asked, planned.facts)
    prompts = certifying_prompts(text.prompts(planned.plan.context_tokens))
    digest = artifact.digest(lambda done, total: progress("reading files", done, total))
    findings = certify_head(planned, text.tokenizer, prompts, progress)
    made = Certificate(
        model=artifact.name,
        version=__version__,
        digest=digest,
        fingerprint=artifact.fingerprint(),
        computation=bound,
        findings=findings.as_dict(),
    )
    return made, certificate_path(folder, artifact, bound)


def start_engine(planned: Planned, text: TextSide, progress: LoadProgress = no_progress) -> EngineThread:
    """Load the weights, build the caches and start the engine's thread.

    Raises:
        ModelLoadError: the plan does not fit, or the weights are not what the config says.
        OutOfMemory: the device had less room than it said.
        OptionError: an op provider asked for cannot run here.
    """
    from troth.run.assemble import assemble

    return assemble(planned, text.tokenizer, text.grammars(planned.recognised.config.vocab_size), progress)


def build_engine(options: dict[str, Any], progress: LoadProgress = no_progress) -> EngineThread:
    """A ``runtime.engine_process.EngineFactory``: everything from finding the model to a running engine.

    Args:
        options: ``model`` and ``engine``, each the fields of its option class as JSON gives them back.
        progress: told how far loading is.

    Raises:
        ModelLoadError, OptionError, OutOfMemory: as the functions above.
    """
    model, engine = ModelOptions(**options["model"]), EngineOptions(**options["engine"])
    if engine.providers is not None:
        engine = replace(engine, providers=tuple(engine.providers))  # JSON knows no tuples
    artifact = find(model)
    return start_engine(plan(artifact, model, engine), load_text(artifact, model), progress)


def disk_folder(folder: Path) -> DiskFolder:
    """The disk cache in a folder, to look at and to clean; makes it if it is not there, and gives up nothing."""
    from troth.cache.disk_folder import DiskFolder

    return DiskFolder(folder, quota_bytes=2**63 - 1)


@contextmanager
def cache_place(planned: Planned, folder: Path) -> Iterator[CachePlace]:
    """Where a model's blocks lie in the disk cache of a folder. Reads all of the model's files.

    Raises:
        OptionError: an op provider asked for cannot run here.
        DeviceError: the folder cannot be used.
    """
    from troth.cache.conversation_file import CachePlace
    from troth.cache.disk_folder import DiskFolder
    from troth.cache.disk_reach import DiskReach
    from troth.contracts.cache_spec import attention_groups, recurrent_bytes
    from troth.run.planned import label_of, namespace_of

    active = [provider.name for provider in provider_status(planned.engine.providers) if provider.active]
    artifact, specs = planned.recognised.artifact, planned.specs
    opened = DiskFolder(folder, quota_bytes=planned.engine.disk_cache_bytes)
    try:
        if opened.trouble:
            raise DeviceError(opened.trouble)
        yield CachePlace(
            folder=opened,
            namespace=namespace_of(planned, artifact.fingerprint(), active),
            common=namespace_of(planned, artifact.digest(), active),
            label=label_of(planned),
            reach=DiskReach(attention_groups(specs), recurrent_bytes(specs) is not None),
        )
    finally:
        opened.close()


def export_conversation(place: CachePlace, token_ids: Sequence[int], path: Path) -> Carried:
    """As cache.conversation_file.export_conversation."""
    from troth.cache import conversation_file

    return conversation_file.export_conversation(place, token_ids, path)


def import_conversation(place: CachePlace, path: Path) -> Carried:
    """As cache.conversation_file.import_conversation."""
    from troth.cache import conversation_file

    return conversation_file.import_conversation(place, path)


def provider_status(order: tuple[str, ...] | None = None) -> tuple[ProviderStatus, ...]:
    """Fix the order of op providers for this process and tell which are in use, and why the others are not.

    Raises:
        OptionError: a provider in ``order`` is unknown or cannot run here.
    """
    from troth.ops import registry

    return registry.activate(order)
