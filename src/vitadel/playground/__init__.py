"""The playground: attack one image of one model in the browser. Only `app` needs gradio."""
