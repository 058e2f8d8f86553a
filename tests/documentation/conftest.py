"""The built site, and a browser to look at it with."""

import functools
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SITE = Path(__file__).parent.parent.parent / "out" / "site"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Nothing."""


@pytest.fixture(scope="session")
def address():
    """Where the site is served, as a web server would."""
    assert (SITE / "index.html").exists(), f"there is no site in {SITE}; make docs builds it."
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def _program(name):
    path = shutil.which(name)
    assert path, f"there is no {name}; Debian has it in chromium and chromium-driver."
    return path


@pytest.fixture(scope="session")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Both named, or selenium asks the network for others.
    options.binary_location = _program("chromium")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(_program("chromedriver")))
    yield driver
    driver.quit()
