package ui

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/url"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/csi-node/csi-node/pkg/ui"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

// patience bounds every wait: it is no measure of speed.
const patience = time.Minute

// browser is the one browser of all tests; each has a tab of its own.
var browser context.Context

func TestMain(m *testing.M) { harness.Main(inBrowser{m}) }

// inBrowser runs tests while the browser does.
type inBrowser struct{ *testing.M }

func (m inBrowser) Run() int {
	program := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "chrome"} {
		if path, err := exec.LookPath(name); err == nil && program == "" {
			program = path
		}
	}
	if program == "" {
		println("There is no Chromium here: `hack/install-deps browser` installs it.")
		return 1
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(program), chromedp.WSURLReadTimeout(patience),
		chromedp.NoSandbox) // root has no sandbox; the page is our own
	allocator, end := chromedp.NewExecAllocator(context.Background(), options...)
	defer end()
	var close context.CancelFunc
	browser, close = chromedp.NewContext(allocator)
	defer close()
	if err := chromedp.Do(browser); err != nil {
		println("Chromium does not start: " + err.Error())
		return 1
	}
	return m.M.Run()
}

// look is how a page is looked at.
type look struct {
	width, height int64
	dark, phone   bool
	forced        bool // in the colours of the system, as of who needs a high contrast
}

var desk = look{width: 1280, height: 900}

// tab is a page that is open.
type tab struct {
	t       *testing.T
	context context.Context
	address string // without the token
	stop    context.CancelFunc
	stopped chan error

	mu   sync.Mutex
	said []string // what the browser had to say against it
	sent []string // addresses that it asked
}

// open serves a scene and opens its page. At the end of the test the browser must have had nothing to say against it,
// and have asked nobody else.
func open(t *testing.T, s *scene, l look) *tab {
	t.Helper()
	p := serve(t, s, 0)
	p.open(l)
	return p
}

// open opens the page at the address in a tab of its own.
func (p *tab) open(l look) {
	t := p.t
	t.Helper()
	page, closePage := chromedp.NewContext(browser)
	t.Cleanup(closePage)
	p.context = page
	must(t, chromedp.Listen(page, p.hear))
	p.look(l)
	must(t, chromedp.Do(page, chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, log.Enable, cdp.Empty{})
		return err
	})))
	must(t, chromedp.Do(page, chromedp.Navigate(p.address)))
	p.address, _, _ = strings.Cut(p.address, "?")
	t.Cleanup(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.said) > 0 {
			t.Errorf("the browser says: %q", p.said)
		}
		for _, address := range p.sent {
			if !strings.HasPrefix(address, p.address) {
				t.Errorf("the page asks %s", address)
			}
		}
	})
}

// serve serves a scene at a port; 0: any.
func serve(t *testing.T, s *scene, port int) *tab {
	t.Helper()
	listener, err := ui.Listen(port)
	must(t, err)
	ctx, stop := context.WithCancel(context.Background())
	said, say := io.Pipe()
	p := &tab{t: t, stop: stop, stopped: make(chan error, 1)}
	go func() { p.stopped <- ui.Serve(ctx, listener, say, s.source()) }()
	lines := bufio.NewReader(said)
	line, err := lines.ReadString('\n')
	must(t, err)
	go func() { _, _ = io.Copy(io.Discard, lines) }() // ends with the test
	p.address = strings.TrimSpace(strings.TrimPrefix(line, "The page is at "))
	t.Cleanup(stop)
	return p
}

// port is the port of an address.
func port(address string) int {
	at, err := url.Parse(address)
	if err != nil {
		panic(err) // it was opened
	}
	n, _ := strconv.Atoi(at.Port())
	return n
}

// hear notes what the browser tells.
func (p *tab) hear(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		text, _ := json.Marshal(e.ExceptionDetails)
		p.said = append(p.said, string(text))
	case *log.EventEntryAdded:
		p.said = append(p.said, e.Entry.Text+" "+e.Entry.URL)
	case *network.EventRequestWillBeSent:
		p.sent = append(p.sent, e.Request.URL)
	}
}

// forget forgets what the browser said, which was as it must be.
func (p *tab) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.said = nil
}

// look changes how the page is looked at.
func (p *tab) look(l look) {
	p.t.Helper()
	scheme := map[bool]string{true: "dark", false: "light"}[l.dark]
	forced := map[bool]string{true: "active", false: "none"}[l.forced]
	var options []chromedp.EmulateViewportOption
	if l.phone {
		options = append(options, chromedp.EmulateMobile, chromedp.EmulateTouch)
	}
	must(p.t, chromedp.Do(p.context, chromedp.EmulateViewport(l.width, l.height, options...), chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"}, {Name: "forced-colors", Value: forced},
		}})
		return err
	})))
}

// eval evaluates an expression in the page.
func eval[T any](p *tab, expression string) T {
	p.t.Helper()
	value, err := chromedp.Run(p.context, chromedp.Evaluate[T](expression))
	if err != nil {
		p.t.Fatalf("%s: %v", expression, err)
	}
	return value
}

// until waits until an expression is true.
func (p *tab) until(expression string) {
	p.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(patience); !eval[bool](p, "Boolean("+expression+")"); {
		select {
		case <-tick.C:
		case <-end:
			p.t.Fatalf("not within %s: %s\nthe page says\n%s", patience, expression, eval[string](p, "document.body.innerText"))
		}
	}
}

// press presses keys, one after the other.
func (p *tab) press(keys ...string) {
	p.t.Helper()
	for _, key := range keys {
		must(p.t, chromedp.Do(p.context, chromedp.KeyEvent(key)))
	}
}

var must = require.NoError
