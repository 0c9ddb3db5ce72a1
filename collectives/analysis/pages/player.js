"use strict";
// The bar under every page: steps forward and back, plays, and keeps the place in the address.
const $ = id => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
const escaped = text => String(text).replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);

/** The bar for a page with: last(), its last step; label(step); show(step, forward); opened(parts)
 *  of the address; word, the step's name there; period in ms; and perhaps key(event), its own keys. */
function player(page) {
  const self = { step: 0 };
  let timer = 0, at = {};
  const aloud = how => document.querySelectorAll("[aria-live]").forEach(e => e.setAttribute("aria-live", how));
  const parts = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  self.link = more => {
    at = { ...at, ...more };
    const kept = Object.entries(at).filter(([, value]) => value !== "");
    const hash = "#" + kept.map(([key, value]) => `${key}=${value}`).join("&");
    if (hash === location.hash) return;
    try { history.replaceState(null, "", hash); } catch { /* some browsers limit how often */ }
  };
  self.go = to => {
    const step = clamp(Math.round(to) || 0, 0, page.last());
    const forward = step === self.step + 1;
    self.step = step;
    $("slide").max = page.last();
    $("slide").value = step;
    $("slide").setAttribute("aria-valuetext", page.label(step));
    $("at").textContent = page.label(step);
    page.show(step, forward);
    self.link({ [page.word]: step });
  };
  self.stop = () => {
    clearInterval(timer);
    timer = 0;
    $("play").textContent = "▶ Play";
    $("play").setAttribute("aria-pressed", "false");
    aloud("polite");
  };
  self.toggle = () => {
    if (timer) return self.stop();
    if (self.step >= page.last()) self.go(0);
    aloud("off");
    $("play").textContent = "❚❚ Pause";
    $("play").setAttribute("aria-pressed", "true");
    const next = () => {
      if (self.step < page.last()) self.go(self.step + 1);
      if (self.step >= page.last()) self.stop();
    };
    timer = setInterval(next, page.period);
    next();
  };
  const by = step => { self.stop(); self.go(step); };
  $("back").onclick = () => by(self.step - 1);
  $("next").onclick = () => by(self.step + 1);
  $("play").onclick = self.toggle;
  $("slide").oninput = () => by(+$("slide").value);
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inside = event.target.closest("select, button, input");
    if (inside && (inside.tagName === "SELECT" || event.key === " " || event.key === "Enter"))
      return;
    const keys = { ArrowRight: self.step + 1, ArrowLeft: self.step - 1, Home: 0, End: page.last(),
      PageDown: self.step + 1, PageUp: self.step - 1 };
    if (page.key && page.key(event)) { /* the page's own */ }
    else if (event.shiftKey) return;
    else if (event.key in keys) by(keys[event.key]);
    else if (/^\d$/.test(event.key)) by(+event.key);
    else if (event.key === " ") self.toggle();
    else return;
    event.preventDefault();
  });
  self.open = () => page.opened(parts());
  addEventListener("hashchange", self.open);
  self.stop();
  return self;
}
