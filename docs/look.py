"""Take screenshots of the site in out/docs, and check that no page is cut off: ``make docs-look``.

A headless Chromium opens the pages from disk, without a network. It writes pictures of a few pages to
out/docs-look, 1280 and 400 pixels wide, light and dark. Every page is checked at both widths:

- The page does not scroll sideways. Tables and code may scroll within themselves.
- At 1280 pixels, code of up to 88 columns is not cut off.
- Each picture has an alternative text, and each page has one title.
- A search shows excerpts, and has the wanted section among its first three results.
- No page loads anything from a network.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

ROOT = Path(__file__).parents[1]
SITE, PICTURES = ROOT / "out/docs", ROOT / "out/docs-look"
PHOTOGRAPHED = (
    *("index", "migration", "masks", "cookbook/decoding", "performance"),
    *("api/attention", "api/caches", "api/layers", "internals", "search"),
)
WIDTHS, SCHEMES, COLUMNS = (1280, 400), ("light", "dark"), 88
CHECK = """
(() => {
  const faults = [], scrolls = document.scrollingElement;
  if (scrolls.scrollWidth > innerWidth) {
    const wide = [...document.body.querySelectorAll('*')].filter(x => {
      for (let y = x.parentElement; y; y = y.parentElement)
        if (getComputedStyle(y).overflowX !== 'visible' && y !== document.body) return false;
      return x.getBoundingClientRect().right > innerWidth + 1;
    });
    faults.push(`${scrolls.scrollWidth} pixels wide: ${wide.slice(-1).map(x => x.outerHTML.slice(0, 120))}`);
  }
  if (innerWidth === WIDE)
    for (const code of document.querySelectorAll('pre')) {
      const columns = Math.max(...code.innerText.split('\\n').map(line => [...line].length));
      if (columns <= COLUMNS && code.scrollWidth > code.clientWidth)
        faults.push(`code of ${columns} columns is cut off: ${code.innerText.slice(0, 60)}`);
    }
  for (const picture of document.querySelectorAll('article img'))
    if (!picture.alt.trim()) faults.push(`${picture.src}: no alternative text`);
  const titles = document.querySelectorAll('h1').length;
  if (titles !== 1) faults.push(`${titles} titles`);
  return faults;
})()
""".replace("WIDE", str(WIDTHS[0])).replace("COLUMNS", str(COLUMNS))


class Browser:
    """A headless Chromium, controlled by the DevTools protocol over two pipes."""

    def __init__(self, program: str, profile: str):
        (low, self._commands), (self._answers, low_back) = os.pipe(), os.pipe()
        theirs, back = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (low, low_back))

        def connect() -> None:  # Chromium reads commands from file descriptor 3 and writes answers to 4
            os.dup2(theirs, 3)
            os.dup2(back, 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [program, *options, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            close_fds=False,
            preexec_fn=connect,
            stderr=subprocess.DEVNULL,
        )
        for end in (low, low_back, theirs, back):
            os.close(end)
        self._events, self._number, self._session = self._read(), 0, {}
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        }
        self.send("Page.enable")
        self.send("Network.enable")

    def _read(self) -> Iterator[dict]:
        rest = b""
        while select.select([self._answers], [], [], 60)[0] and (chunk := os.read(self._answers, 1 << 20)):
            *messages, rest = (rest + chunk).split(b"\0")
            yield from map(json.loads, messages)
        raise SystemExit("chromium ended, or did not answer within a minute")

    def _next(self) -> dict:
        message = next(self._events)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def send(self, method: str, **params) -> dict:
        """Run a command and return its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params} | self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise SystemExit(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.send("Page.navigate", url=url)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> object:
        """Return the value of a script, once it is no longer a promise."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise SystemExit(f"{script[:60]}: {result['exceptionDetails']['exception']['description']}")
        return result["result"].get("value")

    def show(self, width: int, scheme: str) -> None:
        """Set the width of the window in pixels, and the color scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def photograph(self, to: Path) -> None:
        """Write the first 2400 pixels of the page."""
        height = min(2400, self.evaluate("document.scrollingElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": self.evaluate("innerWidth"), "height": height, "scale": 1}
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        to.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._commands)
        os.close(self._answers)


SEARCHES = {
    "window": "glossary.html#window",
    "attention weights": "cookbook/training.html#attention-weights",
    "convert mha to gqa": "cookbook/deploying.html#from-mha-to-gqa",
    "cuda graph": "cookbook/serving.html#a-decoding-step-as-a-cuda-graph",
    "document mask": "cookbook/training.html#document-masks-in-dense-rows",
    "gemma softcap": "glossary.html#softcap",
    "gradient checkpointing": "cookbook/training.html#gradient-checkpointing-without-recomputing-attention",
    "kv cache size": "cookbook/deploying.html#cache-sizes-and-limits",
    "left padding": "cookbook/decoding.html#left-padded-prompts",
    "need_weights": "from_multihead_attention.html#attention-weights-need-weights",
    "prefix lm": "api/masks.html#attnlib.masks.prefix_lm",
    "state dict of MultiheadAttention": (
        "from_multihead_attention.html#copy-the-weights-from-the-state-dict"
    ),
    "stop tokens": "cookbook/decoding.html#stop-tokens-and-streaming",
    "torch.compile": "faq.html#does-it-work-with-torch-compile-cuda-graphs-fsdp-and-peft",
    "variable length": "cookbook/training.html#packed-sequences-of-variable-length",
}
RESULTS = """
new Promise(done => {
  const look = tries => {
    const found = [...document.querySelectorAll('#search-results li')].slice(0, 3);
    const excerpt = found[0]?.querySelector('.context');
    found.length === 3 && excerpt || !tries
      ? done([found.map(x => x.querySelector('a').getAttribute('href')), excerpt?.textContent ?? ''])
      : setTimeout(look, 100, tries - 1);
  };
  look(50);
})
"""


def search(browser: Browser, page: str) -> list[str]:
    """Run the searches on the search page, and return the faults."""
    faults = []
    for query, section in SEARCHES.items():
        browser.open(f"{page}?{urlencode({'q': query})}")
        results, excerpt = browser.evaluate(RESULTS)
        if section not in results:
            faults.append(f"search for {query!r}: expected {section} among the first three, got {results}")
        if not any(word in excerpt.lower() for word in query.lower().split()):
            faults.append(f"search for {query!r}: no excerpt")
    return faults


def look(browser: Browser, site: Path, pictures: Path) -> list[str]:
    """Check all pages of a site, take the pictures, and return the faults."""
    faults = []
    for path in sorted(site.rglob("*.html")):
        page, url = path.relative_to(site).with_suffix("").as_posix(), path.as_uri()
        if page == "search":
            faults += search(browser, url)
            url += "?q=window"
        for width in WIDTHS:
            browser.show(width, "light")
            browser.open(url)
            if page == "search":
                browser.evaluate(RESULTS)  # waits for them
            faults += [f"{page}, {width} pixels: {fault}" for fault in browser.evaluate(CHECK)]
            for scheme in SCHEMES if page in PHOTOGRAPHED else ():
                browser.show(width, scheme)
                browser.photograph(pictures / f"{page.replace('/', '-')}-{width}-{scheme}.png")
    outside = {url for url in browser.requests if not url.startswith(("file:", "data:", "about:", "blob:"))}
    return faults + [f"{url}: not on disk" for url in sorted(outside)]


@contextlib.contextmanager
def opened() -> Iterator[Browser]:
    """Start Chromium and end it.

    Raises:
        SystemExit: there is no ``chromium`` on PATH.
    """
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("docs-look: needs chromium on PATH; install Debian's package chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            yield browser
        finally:
            browser.close()


def main() -> int:
    if not (SITE / "index.html").exists():
        raise SystemExit("docs-look: there is no site in out/docs; run `make docs` first")
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir(parents=True)
    with opened() as browser:
        faults = look(browser, SITE, PICTURES)
    print(*faults, f"{len(faults)} faults. The pictures are in {PICTURES.relative_to(ROOT)}", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
