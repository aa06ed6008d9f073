// For owners' forms: copies a new token, and counts questions while the form of a new account is filled in.
// Nothing here is needed to use the pages.

const TYPING_DELAY = 300; // milliseconds after the last key before it is asked again

for (const button of document.querySelectorAll("[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const field = document.getElementById(button.dataset.copy);
    const status = document.getElementById("copied");
    field.select();
    try {
      await navigator.clipboard.writeText(field.value);
      status.textContent = "Copied.";
    } catch {
      status.textContent = "It is selected: copy it with the keyboard.";
    }
  });
}

const form = document.querySelector("[data-outlook]");
const address = form?.getAttribute("data-outlook"); // form.dataset is the field of that name
let request = new AbortController();
let timer = 0;

async function count() {
  request.abort();
  request = new AbortController();
  const query = new URLSearchParams(new FormData(form));
  for (const secret of ["csrf", "key", "note"]) query.delete(secret); // an address is logged
  try {
    const response = await fetch(`${address}?${query}`, { signal: request.signal });
    if (response.ok && !response.redirected) document.getElementById("outlook").innerHTML = await response.text();
  } catch (problem) {
    if (problem.name !== "AbortError") throw problem;
  }
}

form?.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(() => count().catch(() => {}), TYPING_DELAY);
});
