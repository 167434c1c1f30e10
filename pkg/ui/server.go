package ui

import (
	"bytes"
	"context"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
)

//go:embed page
var page embed.FS

// kinds are the types of the files of the page, by how their names end.
var kinds = map[string]string{
	"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml",
}

// policy lets the page load its own files and ask its own server, and nothing else. No
// script can make elements of a text: what is shown is put in as text.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// headers are those of every answer.
var headers = map[string]string{
	"Content-Security-Policy":      policy,
	"X-Content-Type-Options":       "nosniff",
	"Referrer-Policy":              "no-referrer", // the address of the page may have the token in it
	"Cache-Control":                "no-store",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
}

// server answers the browser.
type server struct {
	token   string
	watcher *watcher
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /events", s.events)
	mux.HandleFunc("GET /explain", s.explain)
	mux.HandleFunc("GET /{$}", file("index.html"))
	for _, name := range []string{"page.css", "page.js", "icon.svg"} {
		mux.HandleFunc("GET /"+name, file(name))
	}
	return s.guard(mux)
}

// guard answers only who names this machine and has the token. The address that was
// printed has the token; from then on the browser has it in a cookie.
func (s *server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		for name, value := range headers {
			w.Header().Set(name, value)
		}
		given, opened := req.URL.Query().Get("token"), false
		if req.URL.Path == "/" && given != "" {
			opened = s.is(given)
		}
		switch {
		case !loopback(req.Host):
			http.Error(w, "This page is served for this machine only, by the names 127.0.0.1 and localhost.", http.StatusMisdirectedRequest)
		case !opened && !slices.ContainsFunc(req.CookiesNamed(cookie(req)), func(c *http.Cookie) bool { return s.is(c.Value) }):
			http.Error(w, "Open the address that was printed at the start: it has a token in it.", http.StatusUnauthorized)
		case req.URL.Path != "/" && !ownPage(req):
			http.Error(w, "This is for the page itself.", http.StatusForbidden)
		default:
			if opened {
				http.SetCookie(w, &http.Cookie{Name: cookie(req), Value: s.token, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode})
			}
			next.ServeHTTP(w, req)
		}
	})
}

func (s *server) is(token string) bool {
	return subtle.ConstantTimeCompare([]byte(token), []byte(s.token)) == 1
}

// loopback reports whether a Host header names this machine. A page of a stranger whose
// name leads to 127.0.0.1 (DNS rebinding) sends its own name. The port is any: it may be
// forwarded.
func loopback(host string) bool {
	name, _ := split(host)
	return name == "127.0.0.1" || name == "::1" || name == "localhost"
}

func split(host string) (name, port string) {
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		return strings.Trim(host, "[]"), ""
	}
	return name, port
}

// cookie is the name of the cookie that has the token. Browsers keep cookies by name, not
// by port, so that the port is in the name.
func cookie(req *http.Request) string {
	_, port := split(req.Host)
	return "csi-node-ui-" + port
}

// ownPage reports whether a request comes from the page that is served here, as far as
// the browser tells: it does not come from another server of this machine.
func ownPage(req *http.Request) bool {
	from := req.Header.Get("Sec-Fetch-Site")
	return from == "" || from == "same-origin" || from == "none"
}

// file serves a file of the page.
func file(name string) http.HandlerFunc {
	text, err := fs.ReadFile(page, "page/"+name)
	if err != nil {
		panic(err) // it is embedded
	}
	_, end, _ := strings.Cut(name, ".")
	return func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", kinds[end])
		http.ServeContent(w, req, name, time.Time{}, bytes.NewReader(text))
	}
}

// writeTime bounds how long a client may take to accept one event.
const writeTime = 10 * time.Second

// events sends each reading to the page, for as long as that is open.
func (s *server) events(w http.ResponseWriter, req *http.Request) {
	s.watcher.join()
	defer s.watcher.leave()
	out := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	if out.Flush() != nil {
		return
	}
	var sent *reading
	for {
		last, replaced := s.watcher.last()
		if last != nil && last != sent {
			err := out.SetWriteDeadline(time.Now().Add(writeTime))
			if err == nil {
				_, err = w.Write(slices.Concat([]byte("data: "), last.text, []byte("\n\n")))
			}
			if err == nil {
				err = out.Flush()
			}
			if err != nil {
				return // the page is closed
			}
			sent = last
		}
		select {
		case <-replaced:
		case <-req.Context().Done():
			return
		}
	}
}

// explainTime bounds how long a volume is looked at.
const explainTime = 30 * time.Second

// explain answers with what is told of a volume that the page shows.
func (s *server) explain(w http.ResponseWriter, req *http.Request) {
	asked := req.URL.Query()
	node, known := s.watcher.node(asked.Get("node"), asked.Get("pod"), asked.Get("volume"))
	if !known {
		http.Error(w, "Nothing is known of this volume on this node any more.", http.StatusNotFound)
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), explainTime)
	defer cancel()
	explanation, err := s.watcher.source.Explain(ctx, node, asked.Get("volume"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(struct { // the page may be closed
		Sections []report.Section `json:"sections"`
	}{explanation.Sections()})
}
