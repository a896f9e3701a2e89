// Applies the chosen colours before the first paint, hence no module: those run later.
(() => {
  const ORDER = ["auto", "light", "dark"];

  function stored() {
    try {
      const name = localStorage.getItem("omlx-theme");
      return ORDER.includes(name) ? name : "auto";
    } catch {
      return "auto"; // storage is switched off in this browser
    }
  }

  function apply(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  }

  apply(stored());

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    let current = stored();

    function show() {
      const { label, [current]: name } = button.dataset;
      button.querySelector("span").textContent = name;
      button.setAttribute("aria-label", `${label}: ${name}`);
      button.title = `${label}: ${ORDER.map((each) => button.dataset[each]).join(", ")}`;
    }

    button.addEventListener("click", () => {
      current = ORDER[(ORDER.indexOf(current) + 1) % ORDER.length];
      try {
        localStorage.setItem("omlx-theme", current);
      } catch {
        // it holds until the page is left
      }
      apply(current);
      show();
      document.dispatchEvent(new Event("omlx:theme"));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      document.dispatchEvent(new Event("omlx:theme")),
    );
    show();
    button.hidden = false;
  });
})();
