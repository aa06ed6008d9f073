// Keeps a page up to date while somebody looks at it. Nothing here is needed to read the pages or to use their forms.

const EVERY = 1500;
const LONGEST = 15000;
const news = document.getElementById("news");
const kept = new Map(); // what the server last sent for each live element, before this script touched it
let pulse = document.body.dataset.pulse;
let wait = EVERY;

document.documentElement.classList.add("live");
for (const element of document.querySelectorAll("[data-live]")) kept.set(element.id, element.innerHTML);

function say(text) {
  if (news.textContent !== text) news.textContent = text;
}

// Focus survives: the element that had it is looked for among the new ones, by its id or by where it links to.
function replace(element, html) {
  const active = element.contains(document.activeElement) ? document.activeElement : null;
  element.innerHTML = html;
  if (active) {
    const href = active.getAttribute("href");
    const again = active.id ? document.getElementById(active.id) : href && element.querySelector(`a[href="${CSS.escape(href)}"]`);
    (again || element.querySelector("a, [tabindex]"))?.focus({ preventScroll: true });
  }
}

async function refresh() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (answer.redirected) return location.reload(); // signed out meanwhile
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  pulse = fresh.body.dataset.pulse;
  let changed = false;
  for (const element of document.querySelectorAll("[data-live]")) {
    const html = fresh.getElementById(element.id)?.innerHTML;
    if (html === undefined || html === kept.get(element.id)) continue;
    kept.set(element.id, html);
    replace(element, html);
    element.classList.remove("fresh");
    void element.offsetWidth; // starts the animation again
    element.classList.add("fresh");
    changed = true;
  }
  if (!changed) return;
  filter?.();
  await Promise.all([draw(), ask()]);
  say(`Updated ${new Date().toLocaleTimeString()}`);
}

async function beat() {
  if (!document.hidden) {
    try {
      const answer = await fetch("/pulse");
      if (answer.status === 401) return location.reload();
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const now = await answer.text();
      if (now !== pulse) await refresh();
      wait = EVERY;
      if (news.textContent.startsWith("No connection")) say("Connected again");
    } catch {
      wait = Math.min(2 * wait, LONGEST);
      say("No connection to the service; what is shown may be old");
    }
  }
  setTimeout(beat, wait);
}

// The overview's filter.
const box = document.querySelector("[data-filter]");
const filter = box && (() => {
  const wanted = box.value.trim().toLowerCase();
  const list = document.getElementById(box.dataset.filter);
  for (const item of list.querySelectorAll("li")) item.hidden = !item.textContent.toLowerCase().includes(wanted);
  for (const section of list.querySelectorAll("section")) section.hidden = !section.querySelector("li:not([hidden])");
});
box?.addEventListener("input", filter);
box?.form.addEventListener("submit", (event) => event.preventDefault());
filter?.();

// The account's chart: Bokeh is fetched once, the chart again whenever something changed.
const chart = document.getElementById("chart");
const dark = matchMedia("(prefers-color-scheme: dark)");
const bokeh = chart && new Promise((done, fail) => {
  const script = document.createElement("script");
  script.src = chart.dataset.bokeh;
  script.onload = () => done(window.Bokeh);
  script.onerror = fail;
  document.head.append(script);
});
let drawn = Promise.resolve();

function draw() {
  if (chart) drawn = drawn.catch(() => {}).then(redraw); // one after the other, so that the newest stays
  return drawn;
}

// The chart has nothing to operate, so the keyboard passes it by; what it shows is said below it.
function passBy(root) {
  for (const one of root.querySelectorAll("*")) {
    if (one.tabIndex >= 0) one.tabIndex = -1;
    if (one.shadowRoot) passBy(one.shadowRoot);
  }
}

async function redraw() {
  const choices = new URLSearchParams(new FormData(document.querySelector("[data-chart]")));
  if (dark.matches) choices.set("theme", "dark");
  const answer = await fetch(`${chart.dataset.from}?${choices}`);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const item = await answer.json();
  const place = document.createElement("div");
  place.hidden = true;
  chart.append(place);
  const { documents, embed } = await bokeh;
  const before = documents.length;
  await embed.embed_item(item, place);
  passBy(place);
  place.hidden = false;
  while (chart.firstChild !== place) chart.firstChild.remove();
  for (const old of documents.splice(0, before)) old.clear(); // Bokeh keeps what was drawn until it is told
}

document.querySelector("[data-chart]")?.addEventListener("change", (event) => {
  const address = new URL(location.href);
  for (const name of ["by", "compare"]) address.searchParams.delete(name);
  for (const [name, value] of new FormData(event.currentTarget)) address.searchParams.set(name, value);
  history.replaceState(null, "", address);
  Promise.all([refresh(), draw()]).catch(() => say("No connection to the service; what is shown may be old"));
});
dark.addEventListener("change", () => draw().catch(() => {}));

// The planner: asks as people type, and forgets an answer that a newer question has overtaken.
const planner = document.querySelector("[data-plan]");
let asked = new AbortController();
let typing = 0;

async function ask() {
  if (!planner) return;
  asked.abort();
  asked = new AbortController();
  try {
    const answer = await fetch(`${planner.dataset.plan}?${new URLSearchParams(new FormData(planner))}`, { signal: asked.signal });
    if (answer.ok && !answer.redirected) document.getElementById("plan").innerHTML = await answer.text();
  } catch (problem) {
    if (problem.name !== "AbortError") throw problem;
  }
}

planner?.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => ask().catch(() => say("No connection to the service")), 200);
});
planner?.addEventListener("submit", (event) => {
  event.preventDefault();
  ask().catch(() => say("No connection to the service"));
});

draw().catch(() => { chart.textContent = "The chart could not be drawn; the numbers are below."; });
if (document.querySelector("[data-live]")) {
  setTimeout(beat, wait);
  document.addEventListener("visibilitychange", () => { wait = EVERY; });
}
