"""The viewer's page in a real Chromium, over the real server: filters, keys, links, live files, and hostile text."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import yaml
from playwright.async_api import async_playwright, expect
from small_world import a_persons_environment
from typer.testing import CliRunner
from view_world import HOSTILE, TASK, attempt, every_outcome, keep, keep_tokenizer, learned_from
from vision_world import page as page_of_pixels
from waits import until

from ragr1_actors.cli import main as cli
from ragr1_actors.cli.view import tokenizer_folders
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.content import PlacedImage
from ragr1_actors.core.errors import RunDirectoryError
from ragr1_actors.core.types import Record
from ragr1_actors.pages.viewer import server as view_server
from ragr1_actors.pages.viewer.parts import Index
from ragr1_actors.pages.viewer.payloads import TokenPieces
from ragr1_actors.pages.viewer.server import ViewServer
from ragr1_actors.runs.storage.store import find_store

pytestmark = pytest.mark.integration
expect.set_options(timeout=120_000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@asynccontextmanager
async def served(run_dir: Path) -> AsyncIterator[ViewServer]:
    index = Index(run_dir / "trajectories", run_dir / "view")
    async with ViewServer(index, "my <b>run</b>", partial(tokenizer_folders, find_store(run_dir), "a-model")) as server:
        yield server


@asynccontextmanager
async def opened(url: str, scheme: str = "light") -> AsyncIterator[object]:
    async with async_playwright() as playwright:
        # Chromium's own sandbox does not start as root, as in a container
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 800})  # type: ignore[arg-type]
        page.set_default_timeout(120_000)
        page.problems = []  # type: ignore[attr-defined]
        page.on("console", lambda m: page.problems.append(m.text) if m.type == "error" else None)  # type: ignore[attr-defined]
        page.on("pageerror", lambda error: page.problems.append(str(error)))  # type: ignore[attr-defined]
        page.requested = []  # type: ignore[attr-defined]
        page.on("request", lambda request: page.requested.append(request.url))  # type: ignore[attr-defined]
        await page.goto(url)
        await page.wait_for_selector("#rows li")
        try:
            yield page
        finally:
            await browser.close()


async def look(page, name: str) -> None:  # type: ignore[no-untyped-def]
    """Keep a screenshot where the environment variable RAGR1_SCREENSHOTS names a folder."""
    if folder := os.environ.get("RAGR1_SCREENSHOTS"):
        await page.screenshot(path=Path(folder) / f"{name}.png")


@needs_chromium
async def test_filters_keys_links_and_views(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        keep(tmp_path, f"iteration_{iteration:05d}", every_outcome())
    async with served(tmp_path) as server, opened(server.url) as page:
        await page.wait_for_selector("#rows li:nth-child(21)")
        first = page.locator("#rows li").first
        assert "correctTom Moss · reward 1.00 · 1 call ·" in (await first.text_content() or "")
        await expect(page.locator("#next")).to_have_css("opacity", "0.45")  # there is no next page
        await page.keyboard.press("5")  # ignored
        await expect(page.locator("#rows li")).to_have_count(3)
        await page.keyboard.press("j")
        await page.wait_for_selector(".tokens span")
        assert await page.locator("h2.question").text_content() == TASK.question
        assert await page.locator(".tokens .kind-model").count() == 3
        assert "250 ms, waited 100 ms · from the cache" in (await page.locator("summary").first.text_content() or "")
        assert await page.locator(".gold").count() == 1
        await look(page, "tokens_by_kind")
        await page.keyboard.press("c")
        await expect(page.locator(".kind-model")).to_have_count(0)
        assert "0.375" in (await page.locator(".tokens span").nth(2).get_attribute("style") or "")  # -2 of -4 nats
        for name in ("advantage", "ratio"):
            assert await page.locator(f"#colour option[value={name}]").is_disabled()
        await expect(page.locator("#detail")).to_contain_text("No RL step trained on this trajectory")
        await page.keyboard.press("s")
        await page.wait_for_selector(".side:nth-child(7)")
        await look(page, "siblings")
        await page.keyboard.press("t")
        await page.wait_for_selector("#over tr:nth-child(4)")
        assert await page.locator("#over tr").count() == 4
        await look(page, "task_over_iterations")
        address = page.url
        await page.keyboard.press("/")
        await page.keyboard.type("no such words")
        await expect(page.locator("#page")).to_have_text("none")
        await page.goto("about:blank")
        await page.goto(address)
        await page.wait_for_selector("h2.question")
        assert await page.locator("#rows li").count() == 3 and "outcome=ignored" in address
        assert page.problems == []
        assert all(url.startswith((server.url, "data:", "about:")) for url in page.requested)


@needs_chromium
async def test_tokens_are_coloured_by_what_was_learned(tmp_path: Path) -> None:
    learned = learned_from("nq/1#0/correct", [1.0, -2.0, 0.0], [1.2, 1 / 1.44, 1.0])
    keep(tmp_path, "iteration_00001", every_outcome(), learned=learned)
    keep(tmp_path, "eval_rl", [attempt("asked")])
    async with served(tmp_path) as server, opened(server.url) as page:
        await page.goto(f"{server.url}/#t/iteration_00001/nq%2F1%230%2Fcorrect")
        await page.wait_for_selector(".tokens span")
        for name, shades in (("advantage", ("rise), 0.375", "heat), 0.75")), ("ratio", ("rise), 0.75", "heat), 0.75"))):
            await page.locator("#colour").select_option(name)
            for index, shade in zip((1, 2), shades, strict=True):
                token = page.locator(".tokens span").nth(index)
                assert f"--{shade}" in (await token.get_attribute("style") or ""), (name, index)
            assert "heat), 0.000)" in (await page.locator(".tokens span").nth(4).get_attribute("style") or "")
            await look(page, f"tokens_by_{name}")
        title = await page.locator(".tokens span").nth(2).get_attribute("title")
        assert title is not None and title.endswith("advantage -2.0000, ratio 0.6944")
        await page.goto(f"{server.url}/#t/eval_rl/asked")
        await expect(page.locator("#colour")).to_have_value("kind")
        await page.goto(f"{server.url}/#t/iteration_00001/nq%2F1%230%2Fcorrect")
        await expect(page.locator("#colour")).to_have_value("ratio")
        assert page.problems == []


@needs_chromium
async def test_images_stand_in_place_of_their_tokens_and_beside_their_records(tmp_path: Path) -> None:
    seen, shown = attempt("seen"), page_of_pixels()
    call = replace(seen.turns[0].calls[0], records=(Record("p", "Page", "its caption", 0.5, shown),))
    turns = (replace(seen.turns[0], calls=(call,)), seen.turns[1])
    places = (PlacedImage(shown, 0, 1, 1), PlacedImage(shown, 2, 1, 2))
    keep(tmp_path, "iteration_00001", [replace(seen, turns=turns, images=places)])
    async with served(tmp_path) as server, opened(server.url) as page:
        await page.goto(f"{server.url}/#t/iteration_00001/seen")
        await expect(page.locator(".tokens img")).to_have_count(2)
        assert await page.locator(".tokens span").count() == 2  # tokens 1 and 4
        await expect(page.locator(".doc img")).to_have_count(1)
        for image in await page.locator("img").all():
            assert await image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 24
        assert page.problems == []


@needs_chromium
async def test_text_of_a_trajectory_is_never_markup(tmp_path: Path) -> None:
    hostile = every_outcome(f"{HOSTILE}#0")
    hostile[0] = attempt(f"{HOSTILE}#0/correct", answer=HOSTILE, passages=(HOSTILE,), document=HOSTILE, text=HOSTILE)
    keep(tmp_path, "iteration_00001", hostile)
    async with served(tmp_path) as server, opened(server.url, "dark") as page:
        for key, shown in (("j", ".tokens"), ("s", ".side"), ("t", "#over td")):
            await page.keyboard.press(key)
            await page.wait_for_selector(shown)
            assert await page.locator("img").count() == 0
            assert await page.locator("body script").count() == 0
            assert "<img src=x" in await page.locator("#detail").inner_text()
        assert await page.title() == "ragr1 view my <b>run</b>"
        assert page.problems == []
        await page.keyboard.press("t")
        await look(page, "hostile_dark")
        # the policy of the page stops what an escape would let through
        await page.evaluate(
            "document.body.append(document.createRange().createContextualFragment("
            "'<img src=x onerror=\"document.title=1\"><script>document.title=2</script>'))"
        )
        await until(lambda: any("Content Security Policy" in problem for problem in page.problems))
        assert await page.title() == "ragr1 view my <b>run</b>"


@needs_chromium
async def test_new_files_appear_and_what_is_open_stays(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", [attempt("first")])
    async with served(tmp_path) as server, opened(server.url) as page:
        await page.keyboard.press("j")
        await page.wait_for_selector("h2.question")
        keep(tmp_path, "iteration_00002", [attempt("second"), attempt("third")])
        await page.wait_for_selector("#rows li:nth-child(3)")
        assert "iteration_00001" in (await page.locator("li[aria-selected=true]").text_content() or "")
        colours = [await page.evaluate("getComputedStyle(document.body).backgroundColor")]
        await page.emulate_media(color_scheme="dark")
        colours.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]
        assert page.problems == []


@needs_chromium
async def test_all_siblings_of_a_large_group_are_shown(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", [attempt(f"g/{number}") for number in range(64)])
    async with served(tmp_path) as server, opened(server.url) as page:
        await page.keyboard.press("j")
        await page.wait_for_selector("h2.question")
        await page.keyboard.press("s")
        await page.wait_for_selector(".side")
        assert await page.locator(".side").count() == 64
        assert "attempts of this group: 64" in await page.locator("#detail").inner_text()
        await look(page, "siblings_64")


@needs_chromium
async def test_a_viewer_that_answers_again_is_shown_as_one(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", [attempt("first")])
    async with served(tmp_path) as server, opened(server.url) as page:
        await page.route("**/api/**", lambda route: route.abort())
        await expect(page.locator("#state")).to_contain_text("the viewer does not answer", timeout=30_000)
        await expect(page.locator("#state")).to_have_css("color", "rgb(179, 38, 30)")
        await page.keyboard.press("j")
        await expect(page.locator("#detail")).to_contain_text("the viewer does not answer")
        await page.unroute("**/api/**")
        await expect(page.locator("#state")).to_have_text("1 trajectories in 1 files", timeout=30_000)
        await expect(page.locator("#state")).to_have_class("")
        await page.wait_for_selector("h2.question")
        await page.locator("#first").fill("x")  # what the server refuses stays until it is corrected
        await expect(page.locator("#state")).to_contain_text("expected a whole number")
        for _ in range(2):  # the page has dealt with the first once it asks again
            async with page.expect_response("**/api/run*"):
                pass
        await expect(page.locator("#state")).to_have_class("bad")


async def test_the_server_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    async with served(tmp_path) as server, aiohttp.ClientSession(server.url) as session:

        async def get(path: str, **headers: str) -> tuple[int, str]:
            async with session.get(path, headers=headers) as answer:
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                return answer.status, await answer.text()

        assert (await get("/"))[0] == 200
        assert (await get("/api/run", Host="evil.example"))[0] == 403
        assert (await get("/../config.yaml"))[0] == 404
        for query in ("outcome=good", "first=-1", "limit=0", "stage=rl", "offset=x"):
            status, text = await get(f"/api/trajectories?{query}")
            assert status == 400 and ("expected" in text or "did you mean" in text)
        assert (await get("/api/trajectory?id=none"))[0] == 404
        async with session.post("/api/run") as answer:
            assert answer.status == 405


async def test_tokens_become_text_with_the_first_checkpoint(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", [attempt("a")])
    async with served(tmp_path) as server, aiohttp.ClientSession(server.url) as session:

        async def pieces() -> list[str]:
            async with session.get("/api/trajectory", params={"id": "a"}) as answer:
                return (await answer.json())["tokens"]["pieces"] if answer.status == 200 else []

        async def shown(expected: str) -> None:
            while (await pieces())[:1] != [expected]:
                await asyncio.sleep(0.05)

        await asyncio.wait_for(shown("5"), 30)
        keep_tokenizer(tmp_path / "checkpoints" / "step_10" / "policy")
        await asyncio.wait_for(shown("five"), 30)


def test_the_tokenizer_is_that_of_the_model_or_the_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    keep_tokenizer(tmp_path / "model")
    assert TokenPieces(tokenizer_folders(find_store(run), str(tmp_path / "model"))).of([5]) == ["five"]
    assert TokenPieces(tokenizer_folders(find_store(run), "a-model")).of([5]) == ["5"]
    keep_tokenizer(tmp_path / "step" / "policy")
    (tmp_path / "step" / "policy" / "model.safetensors").write_bytes(b"weights")
    stored = find_store(run.as_uri())
    assert stored.remote is not None
    stored.remote.put(tmp_path / "step", "checkpoints/step_10")
    *_, folder = tokenizer_folders(stored, "a-model")
    assert TokenPieces([folder]).is_text and not (folder / "model.safetensors").exists()


async def test_the_server_listens_on_loopback_only(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        assert server.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_a_run_until_it_is_stopped(tmp_path: Path, number: int) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    os.mkfifo(tmp_path / "trajectories" / "iteration_00002.arrow")  # nothing waits for its writer
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(RunConfig().model_dump(mode="json")), "utf-8")
    command = [sys.executable, "-m", "ragr1_actors", "view", str(tmp_path)]
    with subprocess.Popen(command, env=a_persons_environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            with urllib.request.urlopen(f"{url}/") as page:
                assert b"view.js" in page.read()
            while b'"num_indexed":1,' not in (state := read(f"{url}/api/run")):
                time.sleep(0.05)
            assert state.count(b"is no regular file") == 1
            process.send_signal(number)
            assert process.wait(120) == 0
        finally:
            process.kill()


def read(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read())


async def test_an_error_of_the_index_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_server, "LOOK_INTERVAL_S", 0.01)

    class Broken(Index):
        num_looks = 0

        def refresh(self) -> bool:
            self.num_looks += 1
            raise KeyError("a bug" if self.num_looks < 5 else "another bug")

    index = Broken(tmp_path / "trajectories", tmp_path / "view")
    async with ViewServer(index, "run", list):
        await until(lambda: index.num_looks > 8)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["'a bug'", "'another bug'"]


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["view", str(tmp_path)])
    assert isinstance(result.exception, RunDirectoryError) and "holds no run" in str(result.exception)
