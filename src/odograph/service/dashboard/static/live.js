// Updates a page while it is open. Nothing here is needed to read the pages or to use their forms.

const POLL_INTERVAL = 1500; // milliseconds
const MAX_POLL_INTERVAL = 15000; // milliseconds, while there is no connection
const TYPING_DELAY = 200; // milliseconds after the last key before the planner or a filter asks
const CONNECTION_LOST = "No connection to the service; the page may be out of date";
const status = document.getElementById("live-status");
const receivedHtml = new Map(); // by id: what the server last sent for a live element, before this script changed it
let dataVersion = document.body.dataset.version;
let pollDelay = POLL_INTERVAL;
let lastRefresh = 0; // counts them: an answer that a later one has overtaken is not shown

document.documentElement.classList.add("live");
for (const element of document.querySelectorAll("[data-live]")) receivedHtml.set(element.id, element.innerHTML);

function showStatus(text) {
  if (status.textContent !== text) status.textContent = text;
}

// The version of what this page shows: of one account and its relatives, or of all accounts.
function versionAddress() {
  const account = location.pathname.match(/^\/accounts\/([^/]+)$/);
  return account ? `/data-version?account=${account[1]}` : "/data-version";
}

// What was chosen or typed in a form, by the name of the field; hidden fields are the server's.
function typedIn(element) {
  const fields = element.querySelectorAll("input:not([type=hidden]), select, textarea");
  return new Map([...fields].filter((field) => field.name).map((field) => [field.name, field]));
}

// Keeps what was typed and chosen in a form, and the focus: it moves to the new element with the same id, name or link.
function replaceContent(element, html) {
  const active = element.contains(document.activeElement) ? document.activeElement : null;
  const typed = typedIn(element);
  element.innerHTML = html;
  for (const [name, field] of typedIn(element)) {
    const old = typed.get(name);
    if (old && field.type === "checkbox") field.checked = old.checked;
    else if (old) field.value = old.value;
    if (old && old === active && field.type === "text") field.setSelectionRange(old.selectionStart, old.selectionEnd);
  }
  if (active) {
    const href = active.getAttribute("href");
    const again = active.id ? document.getElementById(active.id)
      : active.name ? element.querySelector(`[name="${CSS.escape(active.name)}"][value="${CSS.escape(active.value)}"]`)
      : href && element.querySelector(`a[href="${CSS.escape(href)}"]`);
    (again || element.querySelector("a, [tabindex]"))?.focus({ preventScroll: true });
  }
}

async function refresh() {
  const own = ++lastRefresh;
  const response = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (response.redirected) return location.reload(); // the session has ended
  if (!response.ok) throw new Error(`status ${response.status}`);
  const newPage = new DOMParser().parseFromString(await response.text(), "text/html");
  if (own !== lastRefresh) return;
  dataVersion = newPage.body.dataset.version;
  let changed = false;
  for (const element of document.querySelectorAll("[data-live]")) {
    const html = newPage.getElementById(element.id)?.innerHTML;
    if (html === undefined || html === receivedHtml.get(element.id)) continue;
    receivedHtml.set(element.id, html);
    replaceContent(element, html);
    element.classList.remove("updated");
    void element.offsetWidth; // restarts the animation
    element.classList.add("updated");
    changed = true;
  }
  if (!changed) return;
  await Promise.all([drawChart(), updatePlan()]);
  showStatus(`Updated ${new Date().toLocaleTimeString()}`);
}

async function poll() {
  if (!document.hidden) {
    try {
      const response = await fetch(versionAddress());
      if (response.status === 401) return location.reload();
      if (!response.ok) throw new Error(`status ${response.status}`);
      if (await response.text() !== dataVersion) await refresh();
      pollDelay = POLL_INTERVAL;
      if (status.textContent.startsWith("No connection")) showStatus("Connected again");
    } catch {
      pollDelay = Math.min(2 * pollDelay, MAX_POLL_INTERVAL);
      showStatus(CONNECTION_LOST);
    }
  }
  setTimeout(poll, pollDelay);
}

// The box above a column of boxes chooses all of them.
document.addEventListener("change", ({ target }) => {
  if (!target.matches("[data-all]")) return;
  for (const box of target.form.querySelectorAll("input[type=checkbox][name]")) box.checked = target.checked;
});

// The filters of the overview: the address has what is chosen, and the service sends that page of the accounts.
const filters = document.querySelector("[data-filter]");
let filterTimer = 0;

function applyFilters() {
  clearTimeout(filterTimer);
  const chosen = new URLSearchParams([...new FormData(filters)].filter(([, value]) => value.trim()));
  history.replaceState(null, "", chosen.size ? `?${chosen}` : location.pathname);
  refresh().catch(() => showStatus(CONNECTION_LOST));
}

filters?.addEventListener("input", () => {
  clearTimeout(filterTimer);
  filterTimer = setTimeout(applyFilters, TYPING_DELAY);
});
filters?.addEventListener("submit", (event) => {
  event.preventDefault();
  applyFilters();
});

// The chart of an account: BokehJS is loaded once, the chart again after every change.
const chart = document.getElementById("chart");
const darkTheme = matchMedia("(prefers-color-scheme: dark)");
const bokeh = chart && new Promise((resolve, reject) => {
  const script = document.createElement("script");
  script.src = chart.dataset.bokeh;
  script.onload = () => resolve(window.Bokeh);
  script.onerror = reject;
  document.head.append(script);
});
let lastDrawing = Promise.resolve();

function drawChart() {
  if (chart) lastDrawing = lastDrawing.catch(() => {}).then(fetchAndDrawChart); // one at a time: the newest remains
  return lastDrawing;
}

// The chart has no controls, so the keyboard skips it; the text below it says what it shows.
function removeFromTabOrder(root) {
  for (const element of root.querySelectorAll("*")) {
    if (element.tabIndex >= 0) element.tabIndex = -1;
    if (element.shadowRoot) removeFromTabOrder(element.shadowRoot);
  }
}

async function fetchAndDrawChart() {
  const options = new URLSearchParams(new FormData(document.querySelector("[data-chart]")));
  if (darkTheme.matches) options.set("theme", "dark");
  const response = await fetch(`${chart.dataset.from}?${options}`);
  if (!response.ok) throw new Error(`status ${response.status}`);
  const item = await response.json();
  const container = document.createElement("div");
  container.hidden = true;
  chart.append(container);
  const { documents, embed } = await bokeh;
  const oldCount = documents.length;
  await embed.embed_item(item, container);
  removeFromTabOrder(container);
  container.hidden = false;
  while (chart.firstChild !== container) chart.firstChild.remove();
  for (const old of documents.splice(0, oldCount)) old.clear(); // Bokeh keeps old documents otherwise
}

document.querySelector("[data-chart]")?.addEventListener("change", (event) => {
  const address = new URL(location.href);
  for (const name of ["by", "compare"]) address.searchParams.delete(name);
  for (const [name, value] of new FormData(event.currentTarget)) address.searchParams.set(name, value);
  history.replaceState(null, "", address);
  Promise.all([refresh(), drawChart()]).catch(() => showStatus(CONNECTION_LOST));
});
darkTheme.addEventListener("change", () => drawChart().catch(() => {}));

// The planner asks while the user types; a newer question cancels an older one.
const planner = document.querySelector("[data-plan]");
let planRequest = new AbortController();
let typingTimer = 0;

async function updatePlan() {
  if (!planner) return;
  planRequest.abort();
  planRequest = new AbortController();
  try {
    const query = new URLSearchParams(new FormData(planner));
    const response = await fetch(`${planner.dataset.plan}?${query}`, { signal: planRequest.signal });
    if (response.ok && !response.redirected) document.getElementById("plan").innerHTML = await response.text();
  } catch (problem) {
    if (problem.name !== "AbortError") throw problem;
  }
}

planner?.addEventListener("input", () => {
  clearTimeout(typingTimer);
  typingTimer = setTimeout(() => updatePlan().catch(() => showStatus(CONNECTION_LOST)), TYPING_DELAY);
});
planner?.addEventListener("submit", (event) => {
  event.preventDefault();
  updatePlan().catch(() => showStatus(CONNECTION_LOST));
});

drawChart().catch(() => { chart.textContent = "The chart could not be drawn; the numbers are linked below."; });
if (document.querySelector("[data-live]")) {
  setTimeout(poll, pollDelay);
  document.addEventListener("visibilitychange", () => { pollDelay = POLL_INTERVAL; });
}
