"""Every page in Chromium, on a desk and on a phone, light and dark: nothing is broken, cut off or hard to read."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = sorted(str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md"))
WIDTHS = {"desk": (1280, 900, False), "phone": (390, 844, True)}
SCHEMES = {"light": "default", "dark": "slate"}
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
LEAST_CONTRAST = 4.5
MOST_SHIFT = 0.1  # what web.dev calls good

# Before anything of a page runs.
OBSERVE = """
window.shifted = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifted += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
BROKEN = "return [...document.images].filter((i) => i.loading !== 'lazy' && !i.naturalWidth).map((i) => i.src)"
READY = """
const drawn = [...document.querySelectorAll("[data-measured]")].every((figure) => figure.children.length);
return document.readyState === "complete" && drawn;
"""


@pytest.fixture(params=[(width, colours) for width in WIDTHS for colours in SCHEMES], ids="-".join)
def looked_at(request, browser, address):
    width, colours = request.param
    wide, high, mobile = WIDTHS[width]
    send = browser.execute_cdp_cmd
    size = {"width": wide, "height": high, "deviceScaleFactor": 1, "mobile": mobile}
    send("Emulation.setDeviceMetricsOverride", size)
    send("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": colours}]})
    # The colours of the page before are forgotten, once it is closed and cannot store them again.
    browser.get("about:blank")
    send("Storage.clearDataForOrigin", {"origin": address.rstrip("/"), "storageTypes": "local_storage"})
    script = send("Page.addScriptToEvaluateOnNewDocument", {"source": OBSERVE})
    browser.get_log("browser")
    yield browser
    assert browser.find_element("tag name", "body").get_attribute("data-md-color-scheme") == SCHEMES[colours]
    send("Page.removeScriptToEvaluateOnNewDocument", script)
    send("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_whole_and_legible(page, looked_at, address):
    from selenium.webdriver.support.ui import WebDriverWait

    looked_at.get(address + (f"{page}/" if page != "index" else ""))
    WebDriverWait(looked_at, 20).until(lambda b: b.execute_script(READY))
    run = looked_at.execute_script
    assert [entry["message"] for entry in looked_at.get_log("browser")] == []
    assert run("return document.title").endswith("tensorbed")
    assert run(BROKEN) == []
    assert run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert run("return window.shifted") < MOST_SHIFT
    assert run(CONTRAST, LEAST_CONTRAST) == []
