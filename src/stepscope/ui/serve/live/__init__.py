"""Follow running jobs in a browser: one reader per run folder, as many browsers as there are.

`job_follower` reads a folder and says what a page shows (`live_view`), `channels` hand the latest
to every browser, `verdict_now` explains new windows in a child process, `routes` answers requests.
"""
