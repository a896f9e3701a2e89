// The switch of languages: remembered in a cookie, since the server writes half of the texts.
document.addEventListener("DOMContentLoaded", () => {
  const choice = document.getElementById("language");
  choice.hidden = false;
  choice.addEventListener("change", () => {
    document.cookie = `omlx_lang=${choice.value}; Path=/; Max-Age=31536000; SameSite=Strict`;
    location.reload();
  });
});
