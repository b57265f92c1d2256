"""The pages in a browser."""

import re
import shutil

import pytest

from native.server.served import Served, small_model, until, usual_server
from tilewise.server.pages import POLICY, assets

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=1</script>'
SPEED = re.compile(r"first token after [\d.]+ s, 20 tokens(, [\d.]+ tokens/s)?")  # none of a single piece


@pytest.fixture(scope="module")
def guarded():
    """A server with API keys."""
    server = Served(small_model(), "--served-model-name", "small", "--api-key", "a-secret")
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser):
    """A new page with its own storage; requests to other hosts and errors in it fail the test."""
    context = browser.new_context(viewport={"width": 1100, "height": 750})
    made, wrong = context.new_page(), []
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on(
        "request",
        lambda asked: wrong.append(asked.url) if "127.0.0.1" not in asked.url.split("/")[2] else None,
    )
    made.on("console", lambda line: wrong.append(line.text) if "Content Security" in line.text else None)
    yield made
    context.close()
    assert not wrong


def talk(page, text, tokens=20):
    """Send a message with the keyboard, and wait for the answer."""
    page.fill("#max_tokens", str(tokens)) if page.is_visible("#max_tokens") else None
    page.focus("#prompt")
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:visible")


def open_chat(page, server, seed=3, tokens=20, **checked):
    """The chat page with its settings."""
    page.goto(server.url + "/")
    page.wait_for_selector("#model:has-text('context')")
    page.click("#settings summary")
    page.fill("#seed", str(seed))
    page.fill("#max_tokens", str(tokens))
    for name in checked:
        page.check(f"#{name}")
    page.click("#settings summary")


def test_pages_need_no_key_and_have_a_policy(guarded):
    """Files are public, the server's data is not; files refer to nothing elsewhere."""
    for path in assets():
        status, content = guarded.get(path)
        assert status == 200
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", content)
        assert "innerHTML" not in content and "eval(" not in content
    assert guarded.get("/status.json")[0] == guarded.get("/metrics")[0] == 401
    assert "unsafe" not in POLICY and "default-src 'none'" in POLICY


@pytest.mark.slow
def test_an_answer_is_shown_and_stored(page):
    """Text, speed, probabilities by pointer and arrow keys; after a reload the conversation is there."""
    open_chat(page, usual_server(), logprobs=True)
    talk(page, "hello", 60)
    answer = page.locator("article.assistant .body")
    text = answer.text_content()
    assert text and SPEED.fullmatch(page.text_content("#speed"))
    tokens = page.locator(".token")
    assert tokens.count() >= 2  # those that end a character; what comes in one piece may be one of them
    tokens.nth(1).hover()
    lines = page.text_content("#tip").splitlines()
    assert len(lines) in (5, 6) and all("%" in line for line in lines)
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.locator("article.assistant .body").text_content() == text
    assert page.text_content("#list button") == "hello"


@pytest.mark.slow
def test_messages_are_shown_as_text(page):
    """Markup of users and of a model is shown and never executed."""
    open_chat(page, usual_server())
    talk(page, EVIL)
    assert page.locator("article.user .body").text_content() == EVIL
    page.evaluate(
        """evil => { const kept = JSON.parse(localStorage["tilewise.conversations"]);
        kept[0].messages[1] = {role: "assistant", content: evil, tokens: [{text: evil}]};
        localStorage["tilewise.conversations"] = JSON.stringify(kept); }""",
        EVIL,
    )
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.locator("article.assistant .body").text_content() == EVIL
    assert page.evaluate("window.evil") is None and page.locator("article img").count() == 0


def answer_with(page, text):
    """The body of a stored answer as the page shows it."""
    page.evaluate(
        """text => { localStorage["tilewise.conversations"] = JSON.stringify([{id: "1", title: "x",
        messages: [{role: "user", content: text}, {role: "assistant", content: text}]}]); }""",
        text,
    )
    page.reload()
    page.wait_for_selector("article.assistant .body > *")
    assert page.evaluate("window.evil") is None
    assert page.locator("article.user .body").inner_html().count("<") == 0  # as the person wrote it
    body = page.locator("article.assistant .body")
    assert body.text_content() == text
    return body


@pytest.mark.slow
def test_code_blocks(page):
    """Text between fences is its own block; the whole text is there, and nothing is executed."""
    page.goto(usual_server().url + "/")
    text = f"So:\n```html\n{EVIL}\n  x\n```\nand\n\n```\nlast"
    body = answer_with(page, text)
    assert body.locator("code").all_text_contents() == [f"{EVIL}\n  x\n", "last"]
    assert "```" not in body.inner_text() and page.locator("article img").count() == 0


@pytest.mark.slow
def test_bold_lists_and_inline_code(page):
    """Without their marks, which stay as hidden text; nested lists; markup within them is text."""
    page.goto(usual_server().url + "/")
    text = (
        f"Some **bold `a**b` {EVIL}** and `x <b> **y**`, ``a`b``:\n\n- one\n  - *inner*\n  goes on\n- **two**\n\n"
        "3. third\n4. fourth\n\nEnd: 2 ** 3 ** 4, **open and `open\n* a\n1) b"
    )
    body = answer_with(page, text)
    assert body.locator("strong").all_inner_texts() == [f"bold a**b {EVIL}", "two"]
    assert body.locator("code.inline").all_inner_texts() == ["a**b", "x <b> **y**", "a`b"]
    items = [
        [line.strip() for line in one.splitlines() if line.strip()]
        for one in body.locator("li").all_inner_texts()
    ]
    assert items == [
        ["one", "*inner*", "goes on"],
        ["*inner*"],
        ["two"],
        ["third"],
        ["fourth"],
        ["a"],
        ["b"],
    ]
    assert body.locator("ul > li ul > li").count() == 1 and body.locator("ol").count() == 2
    assert body.locator("ol").first.locator("li").evaluate_all("all => all.map(one => one.value)") == [3, 4]
    assert "End: 2 ** 3 ** 4, **open and `open" in body.inner_text()
    assert page.locator("article img").count() == 0
    made = body.evaluate(
        "node => [...new Set([...node.querySelectorAll('*')].map(one => one.tagName))].sort()"
    )
    assert made == ["CODE", "LI", "OL", "SPAN", "STRONG", "UL"]


@pytest.mark.slow
def test_stop_regenerate_and_delete(page):
    """Escape ends an answer and frees its blocks; it can be generated again; a conversation can be deleted."""
    server = usual_server()
    open_chat(page, server, tokens=200)
    page.fill("#prompt", "on and on")
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop:visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    server.wait_idle()
    talk(page, "and now?")
    before = page.locator("article.assistant .body").last.text_content()
    page.locator("article.assistant").last.get_by_text("Again").click()
    page.wait_for_selector("#send:visible")
    assert page.locator("article.assistant .body").last.text_content() == before  # the same seed
    page.click("#new")
    assert page.locator("article").count() == 0
    page.locator("[aria-label^='Delete on']").click()
    assert page.evaluate("JSON.parse(localStorage['tilewise.conversations']).length") <= 1


@pytest.mark.slow
def test_a_key_is_asked_for_and_not_stored(page, guarded):
    """Chat and status ask for it, work with it, and store it nowhere beyond the page."""
    guarded.wait_ready()
    for path, field, done in (
        ("/", "#key", "#model:has-text('context')"),
        ("/status", "#key", "#model:has-text('small')"),
    ):
        page.goto(guarded.url + path)
        page.wait_for_selector(f"{field}:visible")
        page.fill(field, "a-secret")
        page.keyboard.press("Enter") if path == "/status" else page.press(field, "Tab")
        page.wait_for_selector(done)
    assert "a-secret" not in page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )


@pytest.mark.slow
def test_the_status_page_follows_the_server(page):
    """Its figures equal the server's metrics, and its last steps are drawn."""
    server = usual_server()
    server.ask("/v1/completions", {"model": "small", "prompt": "hello", "max_tokens": 9, "ignore_eos": True})
    page.goto(server.url + "/status")
    page.wait_for_selector("#steps rect")
    page.wait_for_selector("#rates polyline", state="attached")
    shown = dict(zip(page.locator("dt").all_text_contents(), page.locator("dd").all_text_contents()))
    written = int(shown["Tokens generated"].replace(",", ""))
    assert written == server.metric("generation_tokens_total") >= 9
    rates = server.get("/status.json")[1]["rates"]
    assert 9 <= sum(rates) <= written  # the server counts, before the page is opened and while it is closed
    page.goto("about:blank")
    server.ask("/v1/completions", {"model": "small", "prompt": "hello", "max_tokens": 7, "ignore_eos": True})
    until(lambda: sum(server.get("/status.json")[1]["rates"]) >= sum(rates) + 7)
    page.goto(server.url + "/status")
    page.wait_for_selector("#rates polyline", state="attached")
    points = page.get_attribute("#rates polyline", "points").split()
    assert len(rates) <= len(points) <= 120 and len({point.split(",")[1] for point in points}) > 1
    assert shown["Texts being generated"] == "0"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone(page, scheme):
    """Nothing is wider than the screen; conversations fold away; the colour scheme follows the system's."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 640})
    open_chat(page, usual_server())
    talk(page, "a word that is wide: " + "w" * 200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert not page.is_visible("#new")
    page.click("#toggle")
    assert page.is_visible("#new") and page.get_attribute("#toggle", "aria-expanded") == "true"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(25, 25, 24)"
    assert dark == (scheme == "dark")
