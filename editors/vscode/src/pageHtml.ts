// The panel's HTML: nothing may be loaded but its own script and styles.

export interface PageParts {
  readonly script: string;
  readonly style: string;
  /** Where VS Code serves the extension's files from. */
  readonly source: string;
  readonly nonce: string;
}

export function pageHtml({ script, style, source, nonce }: PageParts): string {
  const policy = `default-src 'none'; style-src ${source}; script-src 'nonce-${nonce}'`;
  return `<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<meta name="viewport" content="width=device-width">
<link rel="stylesheet" href="${style}">
<title>stepscope</title>
</head>
<body><script nonce="${nonce}" src="${script}"></script></body>
</html>`;
}

const POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; font-src data:";

/** A report as a tab: its own scripts run, but nothing is fetched from anywhere. */
export function reportHtml(report: string): string {
  const meta = `<meta http-equiv="Content-Security-Policy" content="${POLICY}">`;
  const head = /<head[^>]*>/i.exec(report);
  if (head === null) return meta + report;
  const end = head.index + head[0].length;
  return report.slice(0, end) + meta + report.slice(end);
}
