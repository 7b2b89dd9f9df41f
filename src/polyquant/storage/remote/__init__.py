"""Files of URLs, read by ranges and written in parts.

../locations.py       a URL as a path, which `Source` opens like any file; the interface of a backend
source.py             RemoteSource: `Source` for a RemotePath
ranges.py             fetched headers and small files, so that each is read once per process
read_ahead.py         fetches the data of a conversion shortly before it is needed
web.py                https://   any web server with ranges
hub.py                hf://      model repositories of the hub
objects.py            s3://, gs://, az:// and every other URL of fsspec
http.py, retry.py     requests, redirects, deadlines, repetition
urls.py               parsing; the only place with credentials
names.py, extra.py    untrusted names; missing packages
uploads.py            UploadStaging: output to s3://, one multipart upload per file
upload_parts.py       the parts of the uploads, and those in progress
upload_state.py       what an unfinished upload leaves on this machine, to resume it
s3.py                 the requests of multipart uploads
spooled.py            output to other URLs of fsspec: written to this machine, then sent
hub_upload.py         files to a repository of the hub, in one commit
"""
