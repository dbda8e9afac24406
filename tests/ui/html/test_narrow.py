"""The report at 390 pixels, as on a telephone: no text over other text, none beyond the page."""

from __future__ import annotations

from pathlib import Path

import pytest

import stepscope
from jobs import Fault, Plan, make_job
from jobs_files import write_job

pytestmark = pytest.mark.browser

GOLDEN = Path(__file__).parent.parent.parent / "golden"
NARROW = {"viewport": {"width": 390, "height": 900}}
# Rectangles of every visible piece of text, cut where a scrolling box cuts them.
FAULTS = r"""
() => {
  const seen = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.textContent.trim()) continue;
    const parent = node.parentElement;
    if (parent.closest("script, style, option, dialog, .unseen, [hidden], .skip, .top")) continue;
    if (!parent.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
    const clip = clipOf(parent);
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const r of range.getClientRects()) {
      const left = Math.max(r.left, clip.left), right = Math.min(r.right, clip.right);
      const top = Math.max(r.top, clip.top), bottom = Math.min(r.bottom, clip.bottom);
      if (right - left > 1 && bottom - top > 1) seen.push({ node, left, right, top, bottom });
    }
  }
  function clipOf(element) {
    const box = { left: -1e9, right: 1e9, top: -1e9, bottom: 1e9 };
    for (let e = element; e && e !== document.body; e = e.parentElement) {
      const style = getComputedStyle(e);
      if (style.overflowX !== "visible" || style.overflowY !== "visible") {
        const r = e.getBoundingClientRect();
        box.left = Math.max(box.left, r.left); box.right = Math.min(box.right, r.right);
        box.top = Math.max(box.top, r.top); box.bottom = Math.min(box.bottom, r.bottom);
      }
    }
    return box;
  }
  const words = (each) => each.node.textContent.trim().replace(/\s+/g, " ").slice(0, 50);
  const wide = innerWidth;
  const beyond = seen.filter((a) => a.right > wide + 1 || a.left < -1);
  const out = beyond.map((a) => `beyond the page: ${words(a)}`);
  seen.sort((a, b) => a.top - b.top);
  for (let i = 0; i < seen.length; i++) {
    for (let j = i + 1; j < seen.length && seen[j].top < seen[i].bottom - 3; j++) {
      const a = seen[i], b = seen[j];
      if (a.node === b.node) continue;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 2 && down > 4) out.push(`overlap: ${words(a)} | ${words(b)}`);
    }
  }
  const whole = document.documentElement.scrollWidth;
  if (whole > wide) out.push(`the page is ${whole} wide`);
  return [...new Set(out)];
}
"""
OLD_REMEDIES = ".remedies li { display: grid !important; grid-template-columns: auto 1fr auto; }"


def faults(page):
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    return page.evaluate(FAULTS)


@pytest.fixture(scope="module")
def run_report(tmp_path_factory):
    """One process: findings with remedies that have numbers, what-ifs, memory, efficiency."""
    folder = tmp_path_factory.mktemp("narrow")
    return stepscope.write_report(GOLDEN / "h200-resnet18", folder / "run.html", cache=False)


def test_a_run_of_one_process(visit, run_report):
    assert faults(visit(run_report, **NARROW)) == []


def test_text_over_text_would_be_found(visit, run_report):
    page = visit(run_report, **NARROW)
    page.add_style_tag(content=OLD_REMEDIES)
    page.add_style_tag(content=".remedies span { white-space: nowrap; min-width: 0; width: 4em; }")
    assert any(fault.startswith("overlap") for fault in faults(page))
    page.add_style_tag(content=".evidence { width: 900px; }")
    assert any(fault.startswith(("the page", "beyond")) for fault in faults(page))


@pytest.mark.parametrize("name", ["cpu_stack_memory", "cuda_step"])
def test_bare_traces(visit, tmp_path, name):
    trace = GOLDEN / f"{name}.json.gz"
    report = stepscope.write_report(trace, tmp_path / "report.html", cache=False)
    assert faults(visit(report, **NARROW)) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["ddp", "fsdp", "tensor"])
def test_a_job_with_a_straggler(visit, tmp_path, form):
    fault = Fault(cause="compute", size=1.5, place=2)
    plan = Plan(ranks=8, steps=4, form=form, rounds=20, fault=fault)
    write_job(tmp_path / "run", make_job(plan))
    report = stepscope.write_report(tmp_path / "run", tmp_path / "report.html", cache=False)
    assert faults(visit(report, **NARROW)) == []
