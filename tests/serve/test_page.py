"""The page: what it may load, its own tests, and one conversation in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from serving import HERMES, SlowModel, running
from test_offered_tools import CALL, WEATHER

from flashllm.generate.tokenizer import Tokenizer
from flashllm.serve import page

STATIC = Path(page.__file__).with_name("static")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def test_every_file_is_served_under_the_policy(http):
    for path in page.PATHS:
        response = http.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    assert {path.name for path in STATIC.iterdir()} == {name for name, _ in page._FILES.values()}
    assert http.get("/static/../page.py").status_code == 404


def test_the_page_holds_nothing_that_the_policy_forbids():
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bon\w+=|\bstyle=|https?://", text)
    for path in STATIC.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|https?://", path.read_text()
        )


def test_the_page_needs_no_key(tiny, model):
    with running(model, tiny().path(), key=b"0123456789abcdef") as (address, _):
        assert httpx.get(address).status_code == 200
        assert httpx.get(f"{address}/static/page.js").status_code == 200
        assert httpx.get(f"{address}/v1/models").status_code == 401


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_pages_own_tests():
    command = ["node", "--test", str(Path(__file__).with_name("events.test.mjs"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# pass 9" in done.stdout


class Talker(SlowModel):
    """A model that says `text`, and then goes on as it likes."""

    def __init__(self, model, tokenizer, text):
        super().__init__(model)
        self.ids = tokenizer.encode(text, add_special=False)

    def step(self, entries, **options):
        logits = super().step(entries, **options)
        new = len(entries[0][1])
        self.said = 0 if new > 1 else self.said + 1
        if self.said < len(self.ids):
            logits[0, self.ids[self.said]] = 1e4
        return logits


@pytest.fixture
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with (
        sync_api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        yield browser, sync_api.expect


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_reasoning_is_folded_and_calls_are_shown(browser, scripted, tools_path, say):
    tab, expect = browser[0].new_page(), browser[1]
    say(f"<think>\nHm, {EVIL}\n</think>\n\nI look.\n{CALL}")
    with running(scripted, tools_path, template=HERMES) as (address, _):
        tab.goto(address)
        tab.locator("aside summary").click()
        tab.locator("#temperature").fill("0")
        tab.locator("#tools").fill("[")
        tab.locator("#text").fill("Rain?")
        tab.locator("#text").press("Enter")
        expect(tab.locator("#status.error")).to_have_text("The tools in Settings are not JSON.")
        tab.locator("#tools").fill(json.dumps([WEATHER]))
        tab.locator("#text").press("Enter")
        expect(tab.locator("#send")).to_be_visible()
        expect(tab.locator(".assistant .said")).to_have_text("I look.")
        expect(tab.locator(".assistant .call")).to_have_text('get_weather({"city": "Köln", "days": 3})')
        thought = tab.locator(".assistant .thought")
        assert not thought.evaluate("element => element.open")
        expect(thought).to_have_text(f"ReasoningHm, {EVIL}")
        expect(tab).to_have_title("flashllm")
        tab.reload()
        expect(tab.locator(".assistant .call")).to_have_count(1)
        expect(tab.locator(".assistant .thought")).to_have_count(1)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_conversation_in_a_browser(tiny, model, browser):
    browser, expect = browser
    talker = Talker(model._model, Tokenizer.load(tiny().path()), EVIL)
    with running(talker, tiny().path()) as (address, worker):
        tab = browser.new_page()
        problems = []
        tab.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(address)
        expect(tab.locator("#model")).to_have_text("tiny, 96 tokens of context")
        tab.locator("aside summary").click()
        tab.locator("#temperature").fill("0")
        tab.locator("#max_tokens").fill(str(len(talker.ids)))
        # 1. An answer that is markup stays text.
        tab.locator("#text").fill("hi")
        tab.locator("#text").press("Enter")
        expect(tab.locator(".turn.assistant")).to_have_text(EVIL)
        expect(tab.locator("#send")).to_be_visible()
        expect(tab).to_have_title("flashllm")
        assert tab.locator("#log script, #log img").count() == 0
        expect(tab.locator("#speed")).to_contain_text("tokens/s")
        expect(tab.locator("#memory")).to_contain_text("of 1.0 GB")
        assert (
            tab.evaluate("document.querySelector('#chart').getContext('2d').getImageData(3, 215, 1, 1).data[3]") == 255
        )
        # 2. It streams, and stops.
        tab.locator("#new").click()
        talker.delay_s = 0.05
        tab.locator("#max_tokens").fill("70")
        tab.locator("#text").fill("ab")
        tab.locator("#send").click()
        expect(tab.locator(".turn.assistant")).to_contain_text("<script>")
        tab.locator("#stop").click()
        expect(tab.locator(".turn.assistant.stopped")).to_have_count(1)
        tab.wait_for_timeout(200)
        assert not worker._running
        said = tab.locator(".turn.assistant").text_content()
        assert said.startswith("<script>")
        assert len(said) < 69
        # 3. A reload keeps the conversation, and no key.
        tab.locator("#key").fill("something secret")
        tab.locator("#system").fill("Be brief.")
        tab.locator("#system").blur()
        tab.reload()
        expect(tab.locator(".turn")).to_have_text(["ab", said])
        assert tab.locator("#system").input_value() == "Be brief."
        assert tab.locator("#key").input_value() == ""
        # 4. A reload in the middle of an answer keeps the question, and what was said by then.
        tab.locator("#new").click()
        tab.locator("#text").fill("cd")
        tab.locator("#send").click()
        expect(tab.locator(".turn.assistant")).to_contain_text("<script>")
        tab.reload()
        expect(tab.locator(".turn.user")).to_have_text("cd")
        expect(tab.locator(".turn.assistant.stopped")).to_contain_text("<script>")
        # 5. What the server refuses is said.
        tab.locator("#text").fill("more " * 90)
        tab.locator("#text").press("Enter")
        expect(tab.locator("#status.error")).to_contain_text("more than the model's 96 positions")
        assert tab.locator("#text").input_value() == ("more " * 90).strip()
        assert problems == ["Failed to load resource: the server responded with a status of 400 (Bad Request)"]
