"""Pack models into stores that name files by digest: Ollama's model store and OCI image layouts."""
