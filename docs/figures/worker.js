// Search in pages that are read from disk, where browsers start no worker: it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const inner = this.frame.contentWindow;
      const send = inner.postMessage.bind(inner);
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      this.ready = new Promise((loaded) => script.addEventListener("load", loaded));
      script.src = url;
      inner.document.head.append(script);
      this.postMessage = (data) => this.ready.then(() => send(data, "*"));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
