"""The page's address, which holds what is shown."""

import pytest

pytestmark = pytest.mark.browser


def test_back_and_forward_lead_through_what_was_chosen(model_dump, open_page):
    shown = open_page(model_dump)

    def heading():
        return shown.page.locator("#details h2").inner_text()

    def shows(text, stage):
        shown.page.wait_for_selector(f'#details h2:text-is("{text}")')
        assert shown.texts("#stops .current") == [stage]
        assert shown.page.locator("#slider").input_value() == str(stages.index(stage))

    stages = shown.texts("#stops button")
    shown.page.locator(".left .chip").first.click()
    first = heading()
    shown.page.locator(".value").nth(1).click()
    assert heading() == "page_table"
    shown.page.keyboard.press("[")
    shown.page.keyboard.press("2")
    assert shown.page.locator('#tabs [aria-selected="true"]').inner_text() == "Code"
    shown.page.go_back()
    shown.page.wait_for_selector('#tabs [aria-selected="true"] >> text=Picture')
    shows("page_table", "hoisted")
    shown.page.go_back()
    shows("page_table", "lowered")
    assert shown.page.locator(".value.chosen").count() == 1
    shown.page.go_back()
    shows(first, "lowered")
    assert shown.page.locator(".left .chip.chosen").count() == 1
    shown.page.go_back()
    shows("This graph", "lowered")
    shown.page.go_forward()
    shows(first, "lowered")
    shown.page.go_forward()
    shows("page_table", "lowered")


@pytest.mark.parametrize("chosen", [".left .chip", ".value"])
def test_reloading_shows_what_was_chosen(model_dump, open_page, chosen):
    """Also a node of an earlier stage than the slider's, and a value."""
    shown = open_page(model_dump)
    shown.page.locator(".left .chip").nth(2).click()
    shown.page.locator(chosen).nth(1).click()
    panel = shown.page.locator("#details").inner_text()
    shown.page.reload()
    shown.page.wait_for_selector("html[data-ready]")
    assert shown.page.locator("#details").inner_text() == panel
    assert shown.page.locator(f"{chosen}.chosen").count() == 1


def test_an_address_of_another_graph_shows_the_report(model_dump, open_page):
    shown = open_page(model_dump, "view=x&stage=y&node=z&at=q&value=77&piece=3")
    assert shown.page.locator("#details h2").inner_text() == "This graph"
    assert shown.texts("#stops .current") == ["lowered"]
