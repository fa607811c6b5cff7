// Looking again for what is recorded meanwhile.

import { Refused } from "./api.js";

/**
 * Call `look` again and again while the page is visible, until the view is left.
 * @param {{signal: AbortSignal, failed: (error: Error) => void}} its `failed` gets errors that another try does not mend
 * @param {number | null} pause milliseconds until the first call; null for none
 * @param {() => Promise<number | null>} look returns the milliseconds until the next call
 */
export function poll({ signal, failed }, pause, look) {
  let timer = null;
  const again = async () => {
    try {
      if (document.visibilityState === "visible") pause = await look();
    } catch (error) {
      if (!(error instanceof Refused) || (error.status !== 0 && error.status < 500)) {
        failed(error);
        return;
      }
      // The server is away for a moment: asked again later.
    }
    wait();
  };
  const wait = () => {
    if (!signal.aborted && pause !== null) timer = setTimeout(again, pause);
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  wait();
}
