// Poll for newly recorded data.

import { Refused } from "./api.js";

/**
 * Call `look` repeatedly while the page is visible, until the user leaves the view.
 * @param {{signal: AbortSignal, failed: (error: Error) => void}} its `failed` gets errors that a retry would not fix
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
      // The server is temporarily unavailable: try again later.
    }
    wait();
  };
  const wait = () => {
    if (!signal.aborted && pause !== null) timer = setTimeout(again, pause);
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  wait();
}
