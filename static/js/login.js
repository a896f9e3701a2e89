// Sends the key as JSON: forms of other sites can't do that.
const form = document.getElementById("login");
const field = document.getElementById("key");
const problem = document.getElementById("login-error");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.textContent = "";
  try {
    const answer = await fetch("/admin/login", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ key: field.value }),
    });
    if (answer.ok) {
      location.assign("/admin");
      return;
    }
    problem.textContent = (await answer.json()).error.message;
  } catch {
    problem.textContent = "The server does not answer.";
  }
  field.setAttribute("aria-invalid", "true");
  field.select();
});
