"""Commands ``ragr1 index ...``: build, adopt, inspect, search, measure and serve an index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragr1_actors.cli import (
    AllowHostOption,
    Group,
    HostOption,
    JsonOption,
    PortOption,
    RerankerOption,
    TokenEnvOption,
    console,
    errors,
    print_json,
    print_line,
    print_values,
    printable,
)
from ragr1_actors.core.credentials import read_secret
from ragr1_actors.core.errors import ConfigError, UserError
from ragr1_actors.core.process.interrupts import exit_status

if TYPE_CHECKING:
    from ragr1_actors.core.process.progress_bar import CountOf
    from retrieval.base import Passage, Retriever
    from retrieval.corpora.corpus import Corpus

_COUNTED_AT_ONCE = 1000

app = typer.Typer(cls=Group, help="Build, adopt, search, measure and serve an index.", no_args_is_help=True)

IndexArgument = Annotated[Path, typer.Argument(help="An index directory.")]
TasksOption = Annotated[
    list[str], typer.Option("--tasks", help="A task file, a folder of them or a quoted pattern; repeatable.")
]
FormatOption = Annotated[str, typer.Option("--format", help="Format of the corpus; auto recognises it.")]
OptionsOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Option of the index type, such as ef_search=256; repeatable."),
]


@app.command("build")
def build(
    corpus: Annotated[Path, typer.Option("--corpus", help="A corpus file, also compressed; a folder of pages; a PDF.")],
    out: Annotated[Path, typer.Option("--out", help="The index directory to make.")],
    index_type: Annotated[
        str, typer.Option("--type", help="flat, fp16, sq8, pq, ivf, ivf_pq, hnsw, bm25 or hybrid.")
    ] = "flat",
    encoder: Annotated[
        str, typer.Option("--encoder", help="static, or a sentence-transformers folder or hub name; for pages SigLIP.")
    ] = "static",
    vector_type: Annotated[str, typer.Option("--vectors", help="Type of the dense part of a hybrid index.")] = "flat",
    corpus_format: FormatOption = "auto",
    split_words: Annotated[
        int, typer.Option("--split-words", min=0, help="Split passages into this many words; 0: do not split.")
    ] = 0,
    num_shards: Annotated[int, typer.Option("--shards", min=1, help="Files that the vectors are divided into.")] = 1,
    device: Annotated[str, typer.Option("--device", help="Device of the encoder: cpu or cuda.")] = "cpu",
    num_actors: Annotated[
        int, typer.Option("--actors", min=0, help="Ray actors that encode the corpus; 0: this process encodes.")
    ] = 0,
    num_cpus: Annotated[float, typer.Option("--cpus-per-actor", min=0.1, help="CPUs of an actor, and threads.")] = 1,
    num_gpus: Annotated[
        float | None,
        typer.Option("--gpus-per-actor", min=0.01, help="GPUs of an actor.", show_default="1 with --device cuda"),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Delete an unfinished build and start again.")] = False,
    option: OptionsOption = None,
) -> None:
    """Index a corpus. After an interruption the same command continues where it stopped."""
    from cluster.placement import session_with_room
    from cluster.placement_plan import Demand
    from retrieval.build import build_index, building_dir, index_info
    from retrieval.corpora.readers import read_passages
    from retrieval.encoders.embedding import Workers
    from retrieval.images import is_pages

    if is_pages(corpus):
        others = (index_type, vector_type, corpus_format, split_words, num_shards, device, num_actors, num_cpus)
        return _build_pages(corpus, out, encoder, option, (*others, num_gpus, restart))
    _refuse_idle(index_type, vector_type, encoder, device, num_gpus)
    each = (workers := Workers(num_actors, num_cpus, num_gpus, device)).resources
    actors = [Demand("encoding actors", num_actors, each["num_cpus"], each["num_gpus"])] if num_actors else []
    passages = read_passages(corpus, corpus_format=corpus_format, split_words=split_words)
    try:
        with session_with_room(actors):
            build_index(
                passages,
                out,
                encoder=encoder,
                index_type=index_type,
                vector_type=vector_type,
                num_shards=num_shards,
                options=parse_options(option),
                workers=workers,
                restart=restart,
            )
    except KeyboardInterrupt as interrupt:
        print_line(f"interrupted; the same command continues with {building_dir(out)}")
        raise typer.Exit(exit_status(interrupt)) from None
    info = index_info(out)
    print_line(f"{info['count']:,} passages, {info['bytes'] / 1e6:,.1f} MB in {out}")


def _refuse_idle(index_type: str, vector_type: str, encoder: str, device: str, num_gpus: float | None) -> None:
    """Refuse options of a build that would have no effect, with a ``UserError``."""
    if index_type != "hybrid" and vector_type not in ("flat", index_type):
        raise UserError(f"--vectors: got {vector_type} with --type {index_type}; give --type hybrid, or leave it out")
    if index_type == "bm25" and encoder != "static":
        raise UserError(f"--encoder: got {encoder} with --type bm25, which has no vectors; leave it out")
    if num_gpus is not None and device == "cpu":
        raise UserError(f"--gpus-per-actor: got {num_gpus:g} with --device cpu; add --device cuda, or leave it out")


def _build_pages(corpus: Path, out: Path, model: str, option: list[str] | None, others: tuple[object, ...]) -> None:
    from retrieval.images import build_image_index

    if others != ("flat", "flat", "auto", 0, 1, "cpu", 0, 1, None, False):
        raise UserError("got pages, which take only --corpus, --out, --encoder and --option; leave the others out")
    num_pages = build_image_index(corpus, out, model, parse_options(option))
    print_line(f"{num_pages:,} pages in {out}; retrieval.type=images finds them")


@app.command("adopt")
def adopt(
    file: Annotated[Path, typer.Argument(help="A file of faiss.write_index; it is not changed.")],
    corpus: Annotated[Path, typer.Option("--corpus", help="The corpus file that it was made from.")],
    encoder: Annotated[
        str, typer.Option("--encoder", help="The encoder that made it: a sentence-transformers folder or hub name.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The index directory to make.")],
    corpus_format: FormatOption = "auto",
    copy: Annotated[bool, typer.Option("--copy", help="Copy the file; else it gets a hard link.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete what a call left unfinished, start again.")
    ] = False,
) -> None:
    """Make an index of a FAISS file that was made elsewhere; some hundred passages are compared with its vectors."""
    from retrieval.adopt import adopt_index
    from retrieval.build import index_info
    from retrieval.corpora.readers import read_passages

    passages = read_passages(corpus, corpus_format=corpus_format)
    match = adopt_index(file, passages, out, encoder=encoder, copy=copy, restart=restart)
    print_line(str(passages.report))
    info = index_info(out)
    print_line(
        f"{match.kind}: {match.num_compared} passages written as {match.layout!r} have a mean cosine of "
        f"{match.cosine:.4f} with their vectors, and {match.first_share:.1%} are nearest to their own"
    )
    print_line(
        f"{info['count']:,} passages, {info['bytes'] / 1e6:,.1f} MB in {out}, searched as type {info['index_type']}"
    )


@app.command("info")
def info(index: IndexArgument, as_json: JsonOption = False) -> None:
    """Print the manifest of an index, and its size."""
    from retrieval.build import index_info
    from retrieval.images import image_index_info, is_image_index

    found = image_index_info(index) if is_image_index(index) else index_info(index)
    if as_json:
        print_json(found)
    else:
        print_values({name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()})


@app.command("search")
def search(
    index: IndexArgument,
    queries: Annotated[list[str], typer.Argument(help="One or more queries.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Passages per query.")] = 3,
    reranker: RerankerOption = "",
    option: OptionsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search an index."""
    from retrieval.images import ImageRetriever, is_image_index
    from retrieval.local import LocalRetriever

    options = parse_options(option)
    if is_image_index(index):
        if reranker:
            raise UserError(f"--reranker: {index} has page images, which no reranker reads; leave it out")
        found = ImageRetriever({"folder": str(index), **options}).search_batch(queries, k)
        results = [[replace(page, image=None) for page in pages] for pages in found]
    else:
        results = LocalRetriever(index, reranker=reranker, options=options).search_batch(queries, k)
    if as_json:
        print_json([{"query": q, "passages": [asdict(p) for p in ps]} for q, ps in zip(queries, results, strict=True)])
        return
    for query, passages in zip(queries, results, strict=True):
        console.print(printable(query), style="bold", markup=False)
        for passage in passages:
            line = f"  {passage.score:.3f}  {passage.title}: {passage.text}"
            console.print(printable(line), markup=False, highlight=False)


@app.command("eval")
def evaluate(
    index: IndexArgument,
    tasks: TasksOption,
    reranker: RerankerOption = "",
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare with exact search, even if that must encode a large corpus again.")
    ] = False,
    option: OptionsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure recall at k of the questions' supporting passages, recall against exact search, and latency."""
    from envs.tasks.files import load_tasks
    from ragr1_actors.core.process.progress_bar import counted_bars
    from retrieval.evaluation import evaluate_index

    loaded = load_tasks(tasks, whole=True)
    given = parse_options(option)
    with counted_bars(errors) as count:
        found = evaluate_index(index, loaded.tasks, exact=exact, reranker=reranker, options=given, count=count)
    if as_json:
        print_json(found)
        return
    print_line(str(loaded.report))
    if not any(task.supporting_ids for task in loaded.tasks):
        print_line("recall is not measured: no task names its supporting passages")
    print_values(found)


@app.command("audit")
def audit(index: IndexArgument, tasks: TasksOption, as_json: JsonOption = False) -> None:
    """Count the gold answers and the supporting passages that the corpus contains."""
    from envs.tasks.files import load_tasks
    from ragr1_actors.core.process.progress_bar import counted_bars
    from retrieval.corpora.corpus import Corpus
    from retrieval.evaluation import audit_corpus

    loaded, corpus = load_tasks(tasks), Corpus.open(index)
    with counted_bars(errors) as count:
        found = audit_corpus(_counted(corpus, count), loaded.tasks)
    if as_json:
        print_json(asdict(found))
    else:
        print_line(str(found))


def _counted(corpus: Corpus, count: CountOf) -> Iterator[Passage]:
    for number, passage in enumerate(corpus):
        if number % _COUNTED_AT_ONCE == 0:
            count("passages", number, len(corpus))
        yield passage
    count("passages", len(corpus), len(corpus))


@app.command("serve")
def serve(
    index: IndexArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    token_env: TokenEnvOption = "",
    allow_host: AllowHostOption = None,
    num_retrievers: Annotated[
        int, typer.Option("--retrievers", min=0, help="Retriever replicas; 0: this process searches.")
    ] = 0,
    num_encoders: Annotated[
        int, typer.Option("--encoders", min=0, help="Actors that encode queries; 0: the replicas encode.")
    ] = 0,
    mcp: Annotated[bool, typer.Option("--mcp", help="Serve the tool search to clients of MCP, too, at /mcp.")] = False,
    stdio: Annotated[bool, typer.Option("--stdio", help="Serve that tool over stdin and stdout instead.")] = False,
    reranker: RerankerOption = "",
    option: OptionsOption = None,
) -> None:
    """Serve an index over HTTP, with Search-R1's POST /retrieve: {queries, topk, return_scores}, and by MCP."""
    from cluster.session.ray_session import ray_session
    from ragr1_actors.core.config import EncoderActors, RetrievalSettings
    from retrieval.http.server import run_server
    from retrieval.images import ImageRetriever, is_image_index
    from retrieval.replicas.retriever_group import RetrieverGroup

    if (mcp or stdio) and find_spec("mcp") is None:
        raise ConfigError("--mcp and --stdio need the package mcp, which is not installed; pip install -e '.[mcp]'")
    run: Callable[[Retriever], None]
    run = partial(
        run_server, host=host, port=port, token=read_secret("--token-env", token_env), allowed_hosts=allow_host or ()
    )
    if mcp or stdio:
        from retrieval.http.mcp_server import McpEndpoint, run_over_stdio

        run = run_over_stdio if stdio else partial(run, mcp=McpEndpoint)
    if is_image_index(index):
        if num_retrievers or num_encoders or reranker:
            raise UserError(
                f"{index} has page images, which this process searches; give no --retrievers, --encoders or --reranker"
            )
        run(ImageRetriever({"folder": str(index), **parse_options(option)}))
        return
    if num_encoders and not num_retrievers:
        raise UserError(f"--encoders: got {num_encoders} with --retrievers 0; add --retrievers 1, or leave it out")
    settings = RetrievalSettings(
        num_retrievers=num_retrievers,
        num_cpus_per_retriever=1 if num_retrievers else os.cpu_count() or 1,
        encoders=EncoderActors(num_encoders=num_encoders),
        reranker=reranker,
        options=parse_options(option),
    )
    if not num_retrievers:
        run(RetrieverGroup(index, settings).retriever())
        return
    with ray_session(num_retrievers + num_encoders, forks_workers=True):
        group = RetrieverGroup(index, settings)
        try:
            group.wait_until_ready()
            run(group.retriever())
        finally:
            group.stop()


def parse_options(assignments: list[str] | None) -> dict[str, Any]:
    """Read ``["ef_search=256"]`` as ``{"ef_search": 256}``; values are YAML. ``UserError`` on another form."""
    from ragr1_actors.core.resolve import parse_yaml, split_assignment

    options: dict[str, Any] = {}
    for assignment in assignments or []:
        key, value = split_assignment(assignment)
        if value is None:
            raise UserError(f"--option: got {assignment!r}, expected KEY=VALUE, such as ef_search=256")
        options[key] = parse_yaml(value, f"--option {key}")
    return options
