// The search box of the documentation when its pages are opened from files (file://).
//
// Material for MkDocs searches in a web worker, and browsers start none from a file. This script
// replaces `Worker` there by a hidden frame that runs the worker's script and exchanges the same
// messages. Material's offline plugin would load such a script (iframe-worker) from the network;
// `.ci/docs_site.py` puts this one into the site instead.
"use strict";
(() => {
  // Runs inside the frame: what a worker's script expects to find.
  function prepareFrame() {
    window.postMessage = (data) => parent.postMessage(data, "*");
    window.importScripts = (...urls) =>
      urls.reduce((loaded, url) => loaded.then(() => new Promise((done, failed) => {
        const script = document.createElement("script");
        Object.assign(script, { src: url, onload: done, onerror: failed });
        document.body.appendChild(script);
      })), Promise.resolve());
  }

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      addEventListener("message", (event) => {
        if (event.source !== inside) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      inside.document.open();
      inside.document.write(
        `<html><body><script>(${prepareFrame})()<\/script><script src="${url}"><\/script></body></html>`
      );
      inside.document.close();
      this.isLoaded = new Promise((done) => { inside.onload = done; });
    }

    postMessage(data) {
      this.isLoaded.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", structuredClone({ data })));
      });
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.IFrameWorker = IFrameWorker; // the search script looks for this name in its parent
  if (location.protocol === "file:") window.Worker = IFrameWorker;
})();
