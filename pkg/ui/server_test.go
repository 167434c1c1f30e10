package ui

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/require"
)

// one is a source with one node and one volume of a name that a browser could take for
// something else.
func one() Source {
	return Source{
		Title: "test",
		Every: time.Millisecond,
		Read: func(context.Context) (Snapshot, error) {
			return Snapshot{Cluster: report.Cluster{Nodes: []report.NodeOf{{Name: "n", Node: report.Node{
				Running: true,
				Volumes: []report.Status{{Volume: "<b>v</b>", Parts: []report.PartStatus{{Part: "stage", Asked: "staged", Is: report.Settled}}}},
			}}}}}, nil
		},
		Explain: func(_ context.Context, n report.NodeOf, volume string) (report.Explanation, error) {
			if n.Name != "n" {
				return report.Explanation{}, errors.New("of another node")
			}
			return report.Explanation{Volume: volume, Asked: []string{"This."}, YouCan: []string{"Do that."}}, nil
		},
	}
}

// started returns a server of a source whose watcher runs, without a listener.
func started(t *testing.T, source Source) *server {
	t.Helper()
	s := &server{token: "the-token", watcher: newWatcher(source)}
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.watcher.run(ctx)
	}()
	t.Cleanup(func() {
		end()
		<-ended
	})
	return s
}

func get(s *server, target string, change func(*http.Request)) *http.Response {
	req := httptest.NewRequest(http.MethodGet, target, nil)
	req.Host = "127.0.0.1:8080"
	if change != nil {
		change(req)
	}
	w := httptest.NewRecorder()
	s.handler().ServeHTTP(w, req)
	return w.Result()
}

func withCookie(req *http.Request) {
	req.AddCookie(&http.Cookie{Name: "csi-node-ui-8080", Value: "the-token"})
}

func TestOnlyThisMachineWithTheToken(t *testing.T) {
	s := started(t, one())
	host := func(name string) func(*http.Request) {
		return func(req *http.Request) {
			withCookie(req)
			req.Host = name
		}
	}
	from := func(site string) func(*http.Request) {
		return func(req *http.Request) {
			withCookie(req)
			req.Header.Set("Sec-Fetch-Site", site)
		}
	}
	for name, c := range map[string]struct {
		target string
		change func(*http.Request)
		code   int
	}{
		"token":                      {"/?token=the-token", nil, 200},
		"cookie":                     {"/", withCookie, 200},
		"cookie and an old token":    {"/?token=old", withCookie, 200},
		"nothing":                    {"/", nil, 401},
		"another token":              {"/?token=the-toker", nil, 401},
		"the beginning of the token": {"/?token=the", nil, 401},
		"an empty token":             {"/?token=", nil, 401},
		"a file with the token":      {"/page.js?token=the-token", nil, 401},
		"events with the token":      {"/events?token=the-token", nil, 401},
		"a file":                     {"/page.js", withCookie, 200},
		"styles":                     {"/page.css", withCookie, 200},
		"icon":                       {"/icon.svg", withCookie, 200},
		"no file":                    {"/page", withCookie, 404},
		"explain without a cookie":   {"/explain?node=n&volume=v", nil, 401},
		"cookie of another port":     {"/", func(req *http.Request) { req.AddCookie(&http.Cookie{Name: "csi-node-ui-1", Value: "the-token"}) }, 401},
		"forged cookie":              {"/", func(req *http.Request) { req.AddCookie(&http.Cookie{Name: "csi-node-ui-8080", Value: "x"}) }, 401},
		"the right cookie after a forgery": {"/", func(req *http.Request) {
			req.AddCookie(&http.Cookie{Name: "csi-node-ui-8080", Value: "x"})
			withCookie(req)
		}, 200},
		"localhost":                   {"/", host("localhost:8080"), 200},
		"IPv6":                        {"/", host("[::1]:8080"), 200},
		"rebound name":                {"/", host("evil.example:8080"), 421},
		"rebound name with the token": {"/?token=the-token", host("evil.example:8080"), 421},
		"a name that begins alike":    {"/", host("127.0.0.1.evil.example:8080"), 421},
		"a name that ends alike":      {"/", host("notlocalhost:8080"), 421},
		"another address":             {"/", host("10.0.0.1:8080"), 421},
		"no host":                     {"/", host(""), 421},
		"asked by the page":           {"/page.js", from("same-origin"), 200},
		"asked by another port":       {"/explain?node=n&volume=v", from("same-site"), 403},
		"asked by another site":       {"/page.js", from("cross-site"), 403},
		"opened by a link elsewhere":  {"/?token=the-token", from("cross-site"), 200},
		"a change":                    {"/", func(req *http.Request) { withCookie(req); req.Method = http.MethodPost }, 405},
	} {
		t.Run(name, func(t *testing.T) {
			resp := get(s, c.target, c.change)
			if resp.StatusCode != c.code {
				t.Errorf("is answered %s", resp.Status)
			}
			for name, want := range headers {
				if got := resp.Header.Get(name); got != want {
					t.Errorf("%s is %q", name, got)
				}
			}
			set := resp.Cookies()
			if opens := strings.Contains(c.target, "/?token=the-token") && c.code == 200; opens != (len(set) == 1) {
				t.Fatalf("sets the cookies %v", set)
			}
			for _, one := range set {
				if one.Name != "csi-node-ui-8080" || one.Value != "the-token" || !one.HttpOnly || one.SameSite != http.SameSiteStrictMode || one.Path != "/" || one.Domain != "" {
					t.Errorf("sets the cookie %v", one)
				}
			}
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			if c.code != 200 && strings.Contains(string(body), "the-token") {
				t.Errorf("tells the token: %s", body)
			}
		})
	}
}

// Nothing but the page's own files may be loaded, and no text may become markup.
func TestPolicy(t *testing.T) {
	for _, words := range []string{"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"} {
		if !strings.Contains(policy, words) {
			t.Errorf("the policy lacks %s", words)
		}
	}
	if strings.Contains(policy, "unsafe") || strings.Contains(policy, "http") {
		t.Errorf("the policy allows too much: %s", policy)
	}
	s := started(t, one())
	for target, kind := range map[string]string{"/": "text/html; charset=utf-8", "/page.js": "text/javascript; charset=utf-8", "/page.css": "text/css; charset=utf-8", "/icon.svg": "image/svg+xml"} {
		if got := get(s, target, withCookie).Header.Get("Content-Type"); got != kind {
			t.Errorf("%s is %s", target, got)
		}
	}
}

// stream reads what a page gets.
type stream struct {
	t     *testing.T
	lines *bufio.Scanner
}

// listen opens the events of a page that is served at an address, until its cleanup.
func listen(t *testing.T, address, token string) (*stream, context.CancelFunc) {
	t.Helper()
	ctx, end := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address+"/events", nil)
	require.NoError(t, err)
	_, port := split(req.URL.Host)
	req.AddCookie(&http.Cookie{Name: "csi-node-ui-" + port, Value: token})
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	t.Cleanup(func() {
		end()
		_ = resp.Body.Close()
	})
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("events are answered %s as %s", resp.Status, resp.Header.Get("Content-Type"))
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	return &stream{t, lines}, end
}

// next returns the next reading.
func (s *stream) next() (v view) {
	s.t.Helper()
	for s.lines.Scan() {
		if data, is := strings.CutPrefix(s.lines.Text(), "data: "); is {
			require.NoError(s.t, json.Unmarshal([]byte(data), &v))
			return v
		}
	}
	s.t.Fatalf("no more events: %v", s.lines.Err())
	return v
}

// until returns the first reading that is as awaited.
func (s *stream) until(is func(view) bool) view {
	s.t.Helper()
	for {
		if v := s.next(); is(v) {
			return v
		}
	}
}

func TestServe(t *testing.T) {
	l, err := Listen(0)
	require.NoError(t, err)
	if host, _ := split(l.Addr().String()); host != "127.0.0.1" {
		t.Errorf("listens at %s", l.Addr())
	}
	ctx, end := context.WithCancel(t.Context())
	said, say := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, l, say, one()) }()
	line, err := bufio.NewReader(said).ReadString('\n')
	require.NoError(t, err)
	go func() { _, _ = io.Copy(io.Discard, said) }() // ends with the test
	address, err := url.Parse(strings.TrimSpace(strings.TrimPrefix(line, "The page is at ")))
	require.NoError(t, err)
	token := address.Query().Get("token")
	if len(token) < 26 {
		t.Errorf("the token is %q", token)
	}

	resp, err := http.Get(address.String())
	require.NoError(t, err)
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, errors.Join(err, resp.Body.Close()))
	if resp.StatusCode != http.StatusOK || !strings.Contains(string(text), `<script src="page.js" defer>`) {
		t.Errorf("the page is answered %s: %s", resp.Status, text)
	}
	events, _ := listen(t, "http://"+address.Host, token)
	v := events.next()
	if v.Title != "test" || len(v.Nodes) != 1 || v.Nodes[0].Volumes[0].Volume != "<b>v</b>" || v.Nodes[0].Volumes[0].Is != report.Settled || v.At.IsZero() {
		t.Errorf("the page shows %+v", v)
	}

	if _, err := Listen(l.Addr().(*net.TCPAddr).Port); err == nil || !strings.Contains(err.Error(), "--port") {
		t.Errorf("a port that is taken: %v", err)
	}
	end()
	require.NoError(t, <-ended)
	if _, err := http.Get(address.String()); err == nil {
		t.Error("it still serves")
	}
}

// served returns the address at which a server's handler is served.
func served(t *testing.T, s *server) string {
	t.Helper()
	web := httptest.NewServer(s.handler())
	t.Cleanup(web.Close)
	return web.URL
}

// What changes is shown at once, and what cannot be read leaves what was read before.
func TestEventsAreLive(t *testing.T) {
	source := one()
	var now atomic.Pointer[func() (Snapshot, error)]
	set := func(read func() (Snapshot, error)) { now.Store(&read) }
	source.Read = func(context.Context) (Snapshot, error) { return (*now.Load())() }
	nodes := func(part report.PartStatus, refusals ...report.Refusal) func() (Snapshot, error) {
		return func() (Snapshot, error) {
			return Snapshot{Notes: []string{"a note"}, Cluster: report.Cluster{Nodes: []report.NodeOf{{Name: "n", Node: report.Node{
				Running: true, Refusals: refusals,
				Volumes: []report.Status{{Volume: "v", Parts: []report.PartStatus{part}}},
				Storage: []report.Place{{Backend: "pool", Values: []report.Value{{Name: "size_bytes", Value: 100}, {Name: "free_bytes", Value: 25}}}},
			}}}}}, nil
		}
	}
	set(func() (Snapshot, error) { return Snapshot{}, errors.New("not yet") })
	s := started(t, source)
	events, leave := listen(t, served(t, s), s.token)
	if v := events.next(); v.Error != "not yet" || len(v.Nodes) != 0 || !v.At.IsZero() {
		t.Errorf("before anything was read: %+v", v)
	}
	set(nodes(report.PartStatus{Part: "stage", Asked: "staged", Is: report.UnderWay}))
	v := events.until(func(v view) bool { return len(v.Nodes) > 0 })
	if got := v.Nodes[0]; got.Volumes[0].Is != report.UnderWay || len(got.Fills) != 1 || got.Fills[0].Used != 0.75 || v.Notes[0] != "a note" || v.Error != "" {
		t.Errorf("shows %+v", v)
	}
	set(nodes(report.PartStatus{Part: "stage", Asked: "staged", Is: report.Failing, Error: "volume v: boom"}, report.Refusal{Volume: "other", Claim: "ns/claim", Call: "NodeStageVolume", Code: "InvalidArgument", Error: "bad", Times: 1, At: time.Now()}))
	v = events.until(func(v view) bool { return v.Nodes[0].Volumes[0].Is == report.Failing })
	if all := v.Nodes[0].Volumes; len(all) != 2 || all[1].Volume != "other" || all[1].Claim != "ns/claim" || all[1].Is != "" || all[1].Refused == nil || all[1].Refused.Call != "NodeStageVolume" ||
		len(all[0].Story) != 1 || all[0].Story[0].Text != "stage is failing: boom" || len(all[1].Story) != 1 || all[1].Story[0].Text != "NodeStageVolume was refused with InvalidArgument: bad" {
		t.Errorf("shows %+v", all)
	}
	read := v.At
	set(func() (Snapshot, error) { return Snapshot{}, errors.New("it is away") })
	v = events.until(func(v view) bool { return v.Error != "" })
	if v.Error != "it is away" || len(v.Nodes) != 1 || v.At.Before(read) || !v.Now.After(v.At) {
		t.Errorf("shows %+v", v)
	}

	// A page that is opened while another is gets what that has; the stories stay.
	again, _ := listen(t, served(t, s), s.token)
	leave()
	if v := again.next(); len(v.Nodes) != 1 || len(v.Nodes[0].Volumes[0].Story) != 1 {
		t.Errorf("shows %+v", v)
	}
}

func TestExplain(t *testing.T) {
	s := started(t, one())
	events, _ := listen(t, served(t, s), s.token)
	events.next()
	resp := get(s, "/explain?node=n&pod=&volume=%3Cb%3Ev%3C%2Fb%3E", withCookie)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	const want = `{"sections":[{"title":"Asked","sentences":["This."]},{"title":"You can","sentences":["Do that."]}]}`
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "application/json" || strings.TrimSpace(string(body)) != want {
		t.Errorf("is answered %s: %s", resp.Status, body)
	}
	// Only volumes that the page shows reach the source: they become arguments of programs.
	for _, target := range []string{"/explain?node=n&volume=other", "/explain?node=m&volume=%3Cb%3Ev%3C%2Fb%3E", "/explain?node=n&pod=p&volume=%3Cb%3Ev%3C%2Fb%3E", "/explain"} {
		if resp := get(s, target, withCookie); resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s is answered %s", target, resp.Status)
		}
	}
	s.watcher.source.Explain = func(context.Context, report.NodeOf, string) (report.Explanation, error) {
		return report.Explanation{}, errors.New("it does not answer")
	}
	resp = get(s, "/explain?node=n&volume=%3Cb%3Ev%3C%2Fb%3E", withCookie)
	if body, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusBadGateway || strings.TrimSpace(string(body)) != "it does not answer" {
		t.Errorf("is answered %s: %s", resp.Status, body)
	}
}
