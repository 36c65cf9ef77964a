"""What stands behind `semel.http.client`: one delivery for httpx (both colours) and requests, and the keys it keeps."""
