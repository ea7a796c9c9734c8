"""The bundled backends, a folder each, registered under the entry points `rulec.backends` like any other backend."""
